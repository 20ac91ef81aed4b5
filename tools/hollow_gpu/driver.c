// The CUDA driver of a GPU that is not there: torch and Triton look these up by name, and everything succeeds.

#include <stddef.h>

#define SUCCEED(name) \
  int name(void) { return 0; }

SUCCEED(cuInit)
SUCCEED(cuCtxFromGreenCtx)
SUCCEED(cuCtxGetLimit)
SUCCEED(cuCtxPopCurrent)
SUCCEED(cuCtxPushCurrent)
SUCCEED(cuCtxSetCurrent)
SUCCEED(cuCtxSetLimit)
SUCCEED(cuDeviceGet)
SUCCEED(cuDevicePrimaryCtxRetain)
SUCCEED(cuFuncSetAttribute)
SUCCEED(cuFuncSetCacheConfig)
SUCCEED(cuLaunchCooperativeKernel)
SUCCEED(cuLaunchKernel)
SUCCEED(cuLaunchKernelEx)
SUCCEED(cuLinkAddData_v2)
SUCCEED(cuLinkComplete)
SUCCEED(cuLinkCreate_v2)
SUCCEED(cuModuleGetFunction)
SUCCEED(cuModuleLoad)
SUCCEED(cuModuleLoadData)
SUCCEED(cuModuleLoadDataEx)
SUCCEED(cuModuleUnload)
SUCCEED(cuOccupancyMaxActiveBlocksPerMultiprocessor)
SUCCEED(cuOccupancyMaxActiveClusters)
SUCCEED(cuPointerGetAttribute)
SUCCEED(cuTensorMapEncodeTiled)

int cudaDeviceGetAttribute(int* value, int attribute, int device);  // of the runtime, which numbers them alike

int cuCtxGetCurrent(void** context) {
  *context = (void*)1;
  return 0;
}

int cuDeviceGetAttribute(int* value, int attribute, int device) {
  return cudaDeviceGetAttribute(value, attribute, device);
}

int cuDeviceGetCount(int* count) {
  *count = 1;
  return 0;
}

int cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* is_active) {
  *flags = 0;
  *is_active = 1;
  return 0;
}

int cuDriverGetVersion(int* version) {
  *version = 13000;
  return 0;
}

int cuFuncGetAttribute(int* value, int attribute, void* function) {
  *value = attribute == 0 ? 1024 : attribute == 1 ? 0 : 32;  // threads of a block, static shared memory, registers
  return 0;
}

int cuGetErrorString(int error, const char** text) {
  *text = "refused";
  return 0;
}

int cuGetErrorName(int error, const char** text) { return cuGetErrorString(error, text); }
