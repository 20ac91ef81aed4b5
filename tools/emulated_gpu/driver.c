// The CUDA driver of the emulated GPU. torch and Triton look up these functions by name; every call succeeds.

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
SUCCEED(cuFuncSetCacheConfig)
SUCCEED(cuLinkAddData_v2)
SUCCEED(cuLinkComplete)
SUCCEED(cuLinkCreate_v2)
SUCCEED(cuModuleLoadDataEx)
SUCCEED(cuModuleUnload)
SUCCEED(cuOccupancyMaxActiveBlocksPerMultiprocessor)
SUCCEED(cuOccupancyMaxActiveClusters)
SUCCEED(cuTensorMapEncodeTiled)

// From the runtime, which uses the same attribute numbers.
int cudaDeviceGetAttribute(int* value, int attribute, int device);
int cudaFuncSetAttribute(const void* function, int attribute, int value);
const void* emulated_function(const char* module, const char* name);
int emulated_launch(const void* function, const unsigned* grid, const unsigned* block, void** arguments, size_t shared,
                  void* stream);

struct LaunchConfig {
  unsigned grid[3], block[3], shared;
  void* stream;
};

int cuModuleLoadData(void** module, const void* image) {
  *module = (void*)image;
  return 0;
}

int cuModuleGetFunction(const void** function, void* module, const char* name) {
  *function = emulated_function(module, name);
  return 0;
}

int cuFuncSetAttribute(const void* function, int attribute, int value) {
  return cudaFuncSetAttribute(function, attribute, value);
}

int cuLaunchKernelEx(const struct LaunchConfig* how, const void* function, void** arguments, void** extra) {
  return emulated_launch(function, how->grid, how->block, arguments, how->shared, how->stream);
}

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

int cuPointerGetAttribute(unsigned long long* value, int attribute, unsigned long long pointer) {
  *value = pointer;  // the host uses the same address
  return 0;
}

int cuGetErrorString(int error, const char** text) {
  *text = "refused";
  return 0;
}

int cuGetErrorName(int error, const char** text) { return cuGetErrorString(error, text); }
