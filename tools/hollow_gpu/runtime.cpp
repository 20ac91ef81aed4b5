// The CUDA runtime and cuBLAS of a GPU that is not there, as far as torch and FlashInfer call them.
//
// Everything that a host does for a GPU happens: planning, allocation, streams, capture, launches with their checks. What
// the device would compute does not: a kernel is looked at, counted, and not run. So its memory is addresses only, and
// reads as zeros. Launches, copies and captures that no GPU takes are refused; what makes the host wait is counted.

#include <cuda_runtime_api.h>
#include <sys/mman.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>

namespace {

constexpr int kMultiprocessors = 132;             // of an H100
constexpr size_t kSharedOfBlock = 48 << 10;       // that a kernel has without asking
constexpr size_t kSharedOptIn = 227 << 10;        // that it may ask for
constexpr size_t kSharedOfMultiprocessor = 228 << 10;
constexpr size_t kL2 = 50 << 20;

enum class Kind { kDevice, kPinned };

struct Memory {
  size_t size;
  Kind kind;
};

struct Function {
  std::string name;
  size_t shared_limit = kSharedOfBlock;
};

struct Graph {
  size_t num_kernels = 0;
  size_t num_copies = 0;
};

struct Stream {
  Graph* captured = nullptr;
  unsigned long long capture_id = 0;
};

struct Launch {
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
};

std::recursive_mutex mutex;  // guards everything below that is not thread_local
using Guard = std::lock_guard<std::recursive_mutex>;
std::map<uintptr_t, Memory> memories;
std::unordered_map<const void*, Function> functions;
std::set<Stream*> streams;
Stream default_stream;
unsigned long long num_captures = 0;
int num_capturing = 0;
size_t num_bytes_taken = 0;
std::map<std::string, unsigned long long> counts;
thread_local cudaError_t last_error = cudaSuccess;
thread_local Launch pushed;

void count(const std::string& what, unsigned long long by = 1) {
  Guard guard(mutex);
  counts[what] += by;
}

cudaError_t refuse(cudaError_t error, const std::string& why) {
  fprintf(stderr, "hollow GPU: %s\n", why.c_str());
  count("refused");
  return last_error = error;
}

size_t num_bytes() {
  static const size_t bytes = (getenv("HOLLOW_GIB") ? strtoull(getenv("HOLLOW_GIB"), nullptr, 10) : 80ull) << 30;
  return bytes;
}

Stream& of(cudaStream_t stream) {
  bool is_default = stream == nullptr || stream == cudaStreamLegacy || stream == cudaStreamPerThread;
  return is_default ? default_stream : *reinterpret_cast<Stream*>(stream);
}

const Memory* find(const void* pointer, size_t* left = nullptr) {
  Guard guard(mutex);
  auto next = memories.upper_bound(reinterpret_cast<uintptr_t>(pointer));
  if (next == memories.begin()) return nullptr;
  auto [start, memory] = *std::prev(next);
  size_t offset = reinterpret_cast<uintptr_t>(pointer) - start;
  if (offset >= memory.size) return nullptr;
  if (left) *left = memory.size - offset;
  return &std::prev(next)->second;
}

cudaError_t wait(const char* what) {
  count(std::string("wait: ") + what);
  return num_capturing ? refuse(cudaErrorStreamCaptureUnsupported, "the host waits while a graph is captured")
                       : cudaSuccess;
}

cudaError_t take(void** pointer, size_t size, Kind kind) {
  Guard guard(mutex);
  if (kind == Kind::kDevice && num_bytes_taken + size > num_bytes()) return last_error = cudaErrorMemoryAllocation;
  int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;  // addresses cost nothing until they are written to
  void* memory = mmap(nullptr, size ? size : 1, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (memory == MAP_FAILED) return last_error = cudaErrorMemoryAllocation;
  memories[reinterpret_cast<uintptr_t>(memory)] = {size, kind};
  if (kind == Kind::kDevice) num_bytes_taken += size;
  count(kind == Kind::kDevice ? "device allocations" : "pinned allocations");
  *pointer = memory;
  return cudaSuccess;
}

cudaError_t give_back(void* pointer) {
  Guard guard(mutex);
  if (!pointer) return cudaSuccess;
  auto place = memories.find(reinterpret_cast<uintptr_t>(pointer));
  if (place == memories.end()) return refuse(cudaErrorInvalidValue, "memory is freed that was not allocated");
  if (place->second.kind == Kind::kDevice) num_bytes_taken -= place->second.size;
  munmap(pointer, place->second.size ? place->second.size : 1);
  memories.erase(place);
  return cudaSuccess;
}

cudaError_t copy(void* to, const void* from, size_t size, cudaStream_t where) {
  if (!size) return cudaSuccess;
  size_t left_to = size, left_from = size;
  const Memory* target = find(to, &left_to);
  const Memory* source = find(from, &left_from);
  if (left_to < size || left_from < size) return refuse(cudaErrorInvalidValue, "a copy goes past its memory");
  Stream& stream = of(where);
  if (!target || !source) {
    count(target ? "copies from pageable memory" : "copies to pageable memory");
    if (stream.captured) return refuse(cudaErrorStreamCaptureUnsupported, "a copy of pageable memory is captured");
  }
  bool is_to_device = target && target->kind == Kind::kDevice;
  if (stream.captured) {
    stream.captured->num_copies++;
  } else if (!is_to_device && source && source->kind == Kind::kDevice) {
    memset(to, 0, size);
  } else if (!is_to_device) {
    memmove(to, from, size);
  }
  return cudaSuccess;
}

cudaError_t fill(void* to, size_t size, cudaStream_t where) {
  size_t left = size;
  find(to, &left);
  if (left < size) return refuse(cudaErrorInvalidValue, "memory is filled beyond its end");
  if (of(where).captured) of(where).captured->num_copies++;
  return cudaSuccess;
}

cudaError_t launch(const void* function, const Launch& how) {
  Guard guard(mutex);
  auto found = functions.find(function);
  std::string name = found == functions.end() ? "a kernel" : found->second.name;
  size_t limit = found == functions.end() ? kSharedOfBlock : found->second.shared_limit;
  auto [grid, block, shared, where] = how;
  unsigned long long num_threads = 1ull * block.x * block.y * block.z;
  if (!grid.x || !grid.y || !grid.z || grid.x > 0x7fffffff || grid.y > 65535 || grid.z > 65535 || !num_threads ||
      num_threads > 1024 || block.z > 64) {
    return refuse(cudaErrorInvalidConfiguration, name + " is launched with a grid or block that no device has");
  }
  if (shared > limit) return refuse(cudaErrorInvalidValue, name + " is launched with more shared memory than it asked for");
  Stream& stream = of(where);
  if (stream.captured) {
    stream.captured->num_kernels++;
  } else {
    counts[&stream == &default_stream ? "kernels on the default stream" : "kernels"]++;
  }
  return cudaSuccess;
}

int multiply() {  // cuBLAS has its stream in a handle; that a graph is captured is all that matters here
  Guard guard(mutex);
  for (Stream* stream : streams) {
    if (stream->captured) {
      stream->captured->num_kernels++;
      return 0;
    }
  }
  counts["kernels"]++;
  return 0;
}

int make(void** handle) { return (*handle = calloc(1, 256)) ? 0 : 3; }

int drop(void* handle) {
  free(handle);
  return 0;
}

}  // namespace

extern "C" {

// What a program asks about the device that is not there.

unsigned long long hollow_count(const char* what) {
  Guard guard(mutex);
  return counts[what];
}

void hollow_clear() {  // what was refused stays
  Guard guard(mutex);
  std::map<std::string, unsigned long long> kept{{"refused", counts["refused"]}};
  counts.swap(kept);
}

// Kernels.

void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}

void __cudaRegisterFatBinaryEnd(void**) {}

void __cudaUnregisterFatBinary(void**) {}

void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*, int*) {
  Guard guard(mutex);
  functions[host].name = name;
}

void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}

cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void**, size_t shared, cudaStream_t stream) {
  return launch(kernel, {grid, block, shared, stream});
}

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, CUstream_st* stream) {
  pushed = {grid, block, shared, stream};
  return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  *grid = pushed.grid, *block = pushed.block, *shared = pushed.shared;
  *static_cast<cudaStream_t*>(stream) = pushed.stream;
  return cudaSuccess;
}

cudaError_t cudaLaunchKernel(const void* function, dim3 grid, dim3 block, void**, size_t shared, cudaStream_t stream) {
  return launch(function, {grid, block, shared, stream});
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function, void**) {
  return launch(function, {config->gridDim, config->blockDim, config->dynamicSmemBytes, config->stream});
}

cudaError_t cudaFuncSetAttribute(const void* function, cudaFuncAttribute attribute, int value) {
  Guard guard(mutex);
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
  if (value < 0 || static_cast<size_t>(value) > kSharedOptIn) {
    return refuse(cudaErrorInvalidValue, functions[function].name + " asks for more shared memory than there is");
  }
  functions[function].shared_limit = value;
  return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  memset(attributes, 0, sizeof *attributes);
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 64;
  attributes->binaryVersion = attributes->ptxVersion = 90;
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* num, const void*, int, size_t shared, unsigned) {
  *num = shared > kSharedOfMultiprocessor / 2 ? 1 : 2;
  return cudaSuccess;
}

cudaError_t cudaGetSymbolAddress(void** pointer, const void*) { return take(pointer, 1 << 16, Kind::kDevice); }

cudaError_t cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, cudaMemcpyKind) { return cudaSuccess; }

// The device.

cudaError_t cudaGetDeviceCount(int* count) { return *count = 1, cudaSuccess; }
cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaDeviceSynchronize() { return wait("device"); }
cudaError_t cudaDriverGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }
cudaError_t cudaPeekAtLastError() { return last_error; }
cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
const char* cudaGetErrorName(cudaError_t error) { return error == cudaErrorMemoryAllocation ? "out of memory" : "refused"; }
const char* cudaGetErrorString(cudaError_t error) { return cudaGetErrorName(error); }

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  memset(properties, 0, sizeof *properties);
  strcpy(properties->name, "hollow GPU");
  properties->major = 9;
  properties->totalGlobalMem = num_bytes();
  properties->multiProcessorCount = kMultiprocessors;
  properties->warpSize = 32;
  properties->maxThreadsPerBlock = properties->maxThreadsDim[0] = properties->maxThreadsDim[1] = 1024;
  properties->maxThreadsDim[2] = 64;
  properties->maxGridSize[0] = 0x7fffffff;
  properties->maxGridSize[1] = properties->maxGridSize[2] = 65535;
  properties->maxThreadsPerMultiProcessor = 2048;
  properties->regsPerBlock = properties->regsPerMultiprocessor = 65536;
  properties->sharedMemPerBlock = kSharedOfBlock;
  properties->sharedMemPerBlockOptin = kSharedOptIn;
  properties->sharedMemPerMultiprocessor = kSharedOfMultiprocessor;
  properties->l2CacheSize = kL2;
  properties->textureAlignment = 512;
  properties->unifiedAddressing = properties->concurrentKernels = properties->canMapHostMemory = 1;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  static const std::map<int, int> values = {
      {cudaDevAttrComputeCapabilityMajor, 9},
      {cudaDevAttrMultiProcessorCount, kMultiprocessors},
      {cudaDevAttrWarpSize, 32},
      {cudaDevAttrMaxThreadsPerBlock, 1024},
      {cudaDevAttrMaxThreadsPerMultiProcessor, 2048},
      {cudaDevAttrMaxBlocksPerMultiprocessor, 32},
      {cudaDevAttrMaxRegistersPerMultiprocessor, 65536},
      {cudaDevAttrMaxSharedMemoryPerBlock, kSharedOfBlock},
      {cudaDevAttrMaxSharedMemoryPerBlockOptin, kSharedOptIn},
      {cudaDevAttrMaxSharedMemoryPerMultiprocessor, kSharedOfMultiprocessor},
      {cudaDevAttrL2CacheSize, kL2},
      {cudaDevAttrMaxGridDimX, 0x7fffffff},
      {cudaDevAttrMaxGridDimY, 65535},
      {cudaDevAttrMaxGridDimZ, 65535},
      {cudaDevAttrCooperativeLaunch, 1},
  };
  auto found = values.find(attribute);
  *value = found == values.end() ? 0 : found->second;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char* id, int size, int) { return snprintf(id, size, "0000:00:00.0"), cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) { return *least = 0, *greatest = -5, cudaSuccess; }
cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) { return *can = 0, cudaSuccess; }
cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
cudaError_t cudaProfilerStart() { return cudaSuccess; }
cudaError_t cudaProfilerStop() { return cudaSuccess; }

static int succeed() { return 0; }

cudaError_t cudaGetDriverEntryPointByVersion(
    const char*, void** function, unsigned, unsigned long long, cudaDriverEntryPointQueryResult* result) {
  *function = reinterpret_cast<void*>(succeed);
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

// Memory.

cudaError_t cudaMemGetInfo(size_t* left, size_t* total) {
  Guard guard(mutex);
  return *left = num_bytes() - num_bytes_taken, *total = num_bytes(), cudaSuccess;
}

cudaError_t cudaMalloc(void** pointer, size_t size) { return take(pointer, size, Kind::kDevice); }
cudaError_t cudaMallocAsync(void** pointer, size_t size, cudaStream_t) { return take(pointer, size, Kind::kDevice); }
cudaError_t cudaHostAlloc(void** pointer, size_t size, unsigned) { return take(pointer, size, Kind::kPinned); }
cudaError_t cudaFree(void* pointer) { return give_back(pointer); }
cudaError_t cudaFreeAsync(void* pointer, cudaStream_t) { return give_back(pointer); }
cudaError_t cudaFreeHost(void* pointer) { return give_back(pointer); }

cudaError_t cudaHostRegister(void* pointer, size_t size, unsigned) {
  Guard guard(mutex);
  memories[reinterpret_cast<uintptr_t>(pointer)] = {size, Kind::kPinned};
  return cudaSuccess;
}

cudaError_t cudaHostUnregister(void* pointer) {
  Guard guard(mutex);
  bool was_there = memories.erase(reinterpret_cast<uintptr_t>(pointer));
  return was_there ? cudaSuccess : refuse(cudaErrorInvalidValue, "memory is unregistered that was not registered");
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  memset(attributes, 0, sizeof *attributes);
  const Memory* memory = find(pointer);
  attributes->type = !memory                          ? cudaMemoryTypeUnregistered
                     : memory->kind == Kind::kDevice ? cudaMemoryTypeDevice
                                                      : cudaMemoryTypeHost;
  attributes->device = memory ? 0 : -1;
  if (memory) attributes->devicePointer = const_cast<void*>(pointer);
  return cudaSuccess;
}

cudaError_t cudaMemcpy(void* target, const void* source, size_t size, cudaMemcpyKind) {
  cudaError_t error = wait("copy");
  return error ? error : copy(target, source, size, nullptr);
}

cudaError_t cudaMemcpyAsync(void* target, const void* source, size_t size, cudaMemcpyKind, cudaStream_t stream) {
  return copy(target, source, size, stream);
}

cudaError_t cudaMemcpyPeerAsync(void* target, int, const void* source, int, size_t size, cudaStream_t stream) {
  return copy(target, source, size, stream);
}

cudaError_t cudaMemset(void* target, int, size_t size) { return fill(target, size, nullptr); }
cudaError_t cudaMemsetAsync(void* target, int, size_t size, cudaStream_t stream) { return fill(target, size, stream); }

cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int) { return *pool = nullptr, cudaSuccess; }
cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) { return cudaSuccess; }
cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) { return cudaSuccess; }
cudaError_t cudaMemPoolSetAccess(cudaMemPool_t, const cudaMemAccessDesc*, size_t) { return cudaSuccess; }
cudaError_t cudaMemPoolTrimTo(cudaMemPool_t, size_t) { return cudaSuccess; }

// Streams and events.

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  Guard guard(mutex);
  auto* made = new Stream;
  streams.insert(made);
  *stream = reinterpret_cast<cudaStream_t>(made);
  return cudaSuccess;
}

cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) { return *priority = 0, cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return wait("stream"); }
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return cudaSuccess; }

cudaError_t cudaStreamQuery(cudaStream_t stream) {
  return of(stream).captured ? refuse(cudaErrorStreamCaptureUnsupported, "a stream is queried while it is captured")
                             : cudaSuccess;
}

cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t call, void* data, unsigned) {
  return call(stream, cudaSuccess, data), cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t call, void* data) { return call(data), cudaSuccess; }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) { return make(reinterpret_cast<void**>(event)), cudaSuccess; }
cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) { return drop(event), cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaEventRecordWithFlags(cudaEvent_t, cudaStream_t, unsigned) { return cudaSuccess; }
cudaError_t cudaEventQuery(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventSynchronize(cudaEvent_t) { return wait("event"); }
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t, cudaEvent_t) { return *ms = 1, cudaSuccess; }

// Graphs.

cudaError_t cudaStreamBeginCapture(cudaStream_t where, cudaStreamCaptureMode) {
  Guard guard(mutex);
  Stream& stream = of(where);
  if (&stream == &default_stream) return refuse(cudaErrorStreamCaptureUnsupported, "the default stream is captured");
  stream.captured = new Graph;
  stream.capture_id = ++num_captures;
  num_capturing++;
  return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t where, cudaGraph_t* graph) {
  Guard guard(mutex);
  *graph = reinterpret_cast<cudaGraph_t>(std::exchange(of(where).captured, nullptr));
  num_capturing--;
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  *status = of(stream).captured ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(
    cudaStream_t where, cudaStreamCaptureStatus* status, unsigned long long* id, cudaGraph_t* graph,
    const cudaGraphNode_t** nodes, const cudaGraphEdgeData** edges, size_t* count) {
  if (id) *id = of(where).capture_id;
  if (graph) *graph = reinterpret_cast<cudaGraph_t>(of(where).captured);
  if (nodes) *nodes = nullptr;
  if (edges) *edges = nullptr;
  if (count) *count = 0;
  return cudaStreamIsCapturing(where, status);
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  static thread_local cudaStreamCaptureMode current = cudaStreamCaptureModeGlobal;
  std::swap(current, *mode);
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* instance, cudaGraph_t graph, unsigned long long) {
  *instance = reinterpret_cast<cudaGraphExec_t>(new Graph(*reinterpret_cast<Graph*>(graph)));
  return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t instance, cudaStream_t) {
  auto* graph = reinterpret_cast<Graph*>(instance);
  count("graphs");
  count("kernels of graphs", graph->num_kernels);
  return cudaSuccess;
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* count) {
  auto* captured = reinterpret_cast<Graph*>(graph);
  return *count = captured->num_kernels + captured->num_copies, cudaSuccess;
}

cudaError_t cudaGraphNodeGetDependencies(cudaGraphNode_t, cudaGraphNode_t*, cudaGraphEdgeData*, size_t* count) {
  return *count = 0, cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) { return delete reinterpret_cast<Graph*>(graph), cudaSuccess; }
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) { return delete reinterpret_cast<Graph*>(graph), cudaSuccess; }
cudaError_t cudaGraphDebugDotPrint(cudaGraph_t, const char*, unsigned) { return cudaSuccess; }

// cuBLAS: handles and descriptors are made and dropped, products are counted.

int cublasCreate_v2(void** handle) { return make(handle); }
int cublasDestroy_v2(void* handle) { return drop(handle); }
int cublasSetStream_v2(void*, cudaStream_t) { return 0; }
int cublasSetWorkspace_v2(void*, void*, size_t) { return 0; }
int cublasSetMathMode(void*, int) { return 0; }
int cublasGetMathMode(void*, int* mode) { return *mode = 0; }
int cublasSetPointerMode_v2(void*, int) { return 0; }
int cublasGetPointerMode_v2(void*, int* mode) { return *mode = 0; }
int cublasGemmEx() { return multiply(); }
int cublasSgemm_v2() { return multiply(); }
int cublasSgemv_v2() { return multiply(); }
int cublasGemmStridedBatchedEx() { return multiply(); }
int cublasSgemmStridedBatched() { return multiply(); }
int cublasLtMatmul() { return multiply(); }
int cublasLtCreate(void** handle) { return make(handle); }
size_t cublasLtGetVersion() { return 10 * CUDART_VERSION; }
int cublasLtMatmulDescCreate(void** descriptor, int, int) { return make(descriptor); }
int cublasLtMatmulDescDestroy(void* descriptor) { return drop(descriptor); }
int cublasLtMatmulDescSetAttribute() { return 0; }
int cublasLtMatmulPreferenceCreate(void** preference) { return make(preference); }
int cublasLtMatmulPreferenceDestroy(void* preference) { return drop(preference); }
int cublasLtMatmulPreferenceSetAttribute() { return 0; }
int cublasLtMatrixLayoutCreate(void** layout, int, uint64_t, uint64_t, int64_t) { return make(layout); }
int cublasLtMatrixLayoutDestroy(void* layout) { return drop(layout); }
int cublasLtMatrixLayoutSetAttribute() { return 0; }

int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int, void*, int* count) {
  *count = 1;
  return 0;
}

}  // extern "C"
