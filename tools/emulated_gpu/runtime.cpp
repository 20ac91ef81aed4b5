// The CUDA runtime and cuBLAS of the emulated GPU: the functions that torch and FlashInfer call.
//
// The host side is complete: planning, allocation, streams, capture, and launches with their checks. Invalid launches,
// copies and captures are refused; calls that make the host wait are counted. If EMULATED_KERNELS names a folder for
// translations, kernels with PTX run on this CPU. Otherwise the device is hollow: a kernel is checked and counted but
// not run, and memory is only addresses, which read as zeros.

#include "device.hpp"

extern "C" {

// Functions by which a program queries the emulated device.

unsigned long long emulated_count(const char* what) {
  Guard guard(mutex);
  return counts[what];
}

void emulated_clear() {  // refused calls stay counted
  Guard guard(mutex);
  std::map<std::string, unsigned long long> kept{{"refused", counts["refused"]}};
  counts.swap(kept);
}

// Queues a replacement of one of torch's own kernels. Returns whether it was captured.

int emulated_enqueue(cudaStream_t stream, void (*call)(uint64_t), uint64_t which) {
  enqueue(of(stream), [=] { call(which); });
  return of(stream).captured != nullptr;
}

// Kernels.

void** __cudaRegisterFatBinary(void* binary) {
  struct Wrapper {
    int magic, version;
    const char* data;
    void* more;
  };
  return new void*(const_cast<char*>(static_cast<Wrapper*>(binary)->data));
}

void __cudaRegisterFatBinaryEnd(void**) {}

void __cudaUnregisterFatBinary(void**) {}

void __cudaRegisterFunction(
    void** binary, const char* host, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*, int*) {
  Guard guard(mutex);
  functions[host].name = name;
  functions[host].module = static_cast<const char*>(*binary);
}

const void* emulated_function(const char* module, const char* name) {  // from a module of the driver
  Guard guard(mutex);
  auto* key = new Function{name};  // its address identifies it in launches
  functions[key] = {name, kSharedOfBlock, runs_kernels() ? strdup(module) : nullptr};
  return key;
}

cudaError_t emulated_launch(
    const void* function, const unsigned* grid, const unsigned* block, void** arguments, size_t shared,
    cudaStream_t stream) {
  return launch(function, {{grid[0], grid[1], grid[2]}, {block[0], block[1], block[2]}, shared, stream}, arguments);
}

void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}

cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}

cudaError_t __cudaLaunchKernel(
    cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments, size_t shared, cudaStream_t stream) {
  return launch(kernel, {grid, block, shared, stream}, arguments);
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

cudaError_t cudaLaunchKernel(
    const void* function, dim3 grid, dim3 block, void** arguments, size_t shared, cudaStream_t stream) {
  return launch(function, {grid, block, shared, stream}, arguments);
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function, void** arguments) {
  return launch(function, {config->gridDim, config->blockDim, config->dynamicSmemBytes, config->stream}, arguments);
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
cudaError_t cudaDeviceSynchronize() { return wait("device", are_all_idle); }
cudaError_t cudaDriverGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }
cudaError_t cudaPeekAtLastError() { return last_error; }
cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
const char* cudaGetErrorName(cudaError_t error) { return error == cudaErrorMemoryAllocation ? "out of memory" : "refused"; }
const char* cudaGetErrorString(cudaError_t error) { return cudaGetErrorName(error); }

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  memset(properties, 0, sizeof *properties);
  strcpy(properties->name, "emulated GPU");
  properties->major = major();
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
      {cudaDevAttrComputeCapabilityMajor, major()},
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

static int encode_tiles(
    void* map, int type, unsigned rank, void* address, const uint64_t* size, const uint64_t* stride, const uint32_t* box,
    const uint32_t*, int, int swizzle, int, int) {
  static const uint8_t bytes[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4};
  if (rank < 1 || rank > 5)
    return refuse(cudaErrorInvalidValue, "a tensor map has " + std::to_string(rank) + " dimensions");
  TileMap tiles{static_cast<uint8_t*>(address), {}, {}, {}, bytes[type], uint8_t(swizzle)};
  std::copy_n(size, rank, tiles.size);
  std::copy_n(stride, rank - 1, tiles.stride);
  std::copy_n(box, rank, tiles.box);
  memcpy(map, &tiles, sizeof tiles);
  return 0;
}

cudaError_t cudaGetDriverEntryPointByVersion(
    const char* name, void** function, unsigned, unsigned long long, cudaDriverEntryPointQueryResult* result) {
  bool encodes = !strcmp(name, "cuTensorMapEncodeTiled");
  *function = encodes ? reinterpret_cast<void*>(encode_tiles) : reinterpret_cast<void*>(succeed);
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
  cudaError_t error = copy(target, source, size, nullptr);
  return error ? error : wait("copy", [] { return is_idle(default_stream); });
}

cudaError_t cudaMemcpyAsync(void* target, const void* source, size_t size, cudaMemcpyKind, cudaStream_t stream) {
  return copy(target, source, size, stream);
}

cudaError_t cudaMemcpyPeerAsync(void* target, int, const void* source, int, size_t size, cudaStream_t stream) {
  return copy(target, source, size, stream);
}

cudaError_t cudaMemset(void* target, int value, size_t size) { return fill(target, value, size, nullptr); }
cudaError_t cudaMemsetAsync(void* target, int value, size_t size, cudaStream_t stream) {
  return fill(target, value, size, stream);
}

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
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  if (of(stream).captured)
    return refuse(cudaErrorStreamCaptureUnsupported, "the host waits for a stream that is captured");
  return wait("stream", [=] { return is_idle(of(stream)); });
}

cudaError_t cudaStreamWaitEvent(cudaStream_t where, cudaEvent_t event, unsigned) {
  Guard guard(mutex);
  const auto* awaited = reinterpret_cast<Event*>(event);
  Stream& stream = of(where);
  if (runs_kernels() && !stream.captured) stream.queue.push_back({{}, awaited, awaited->recorded});
  return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
  if (of(stream).captured) return refuse(cudaErrorStreamCaptureUnsupported, "a stream is queried while it is captured");
  run_one();
  return is_idle(of(stream)) ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t call, void* data, unsigned) {
  if (!runs_kernels()) return call(stream, cudaSuccess, data), cudaSuccess;
  return enqueue(of(stream), [=] { call(stream, cudaSuccess, data); }), cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t call, void* data) {
  if (!runs_kernels()) return call(data), cudaSuccess;
  return enqueue(of(stream), [=] { call(data); }), cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = reinterpret_cast<cudaEvent_t>(new Event);  // streams may still wait for it when it is destroyed
  return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }

cudaError_t cudaEventRecordWithFlags(cudaEvent_t which, cudaStream_t where, unsigned) {
  Guard guard(mutex);
  auto* event = reinterpret_cast<Event*>(which);
  Stream& stream = of(where);
  if (!runs_kernels() || stream.captured) return cudaSuccess;
  unsigned long long version = ++event->recorded;
  stream.queue.push_back({[=] {
    Guard guard(mutex);
    event->reached = std::max(event->reached, version);
  }});
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { return cudaEventRecordWithFlags(event, stream, 0); }

cudaError_t cudaEventQuery(cudaEvent_t which) {
  run_one();
  Guard guard(mutex);
  const auto* event = reinterpret_cast<Event*>(which);
  return event->reached >= event->recorded ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaEventSynchronize(cudaEvent_t which) {
  const auto* event = reinterpret_cast<Event*>(which);
  unsigned long long version = event->recorded;
  return wait("event", [=] { return event->reached >= version; });
}
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
  std::swap(capture_mode, *mode);
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* instance, cudaGraph_t graph, unsigned long long) {
  *instance = reinterpret_cast<cudaGraphExec_t>(new Graph(*reinterpret_cast<Graph*>(graph)));
  return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t instance, cudaStream_t stream) {
  auto* graph = reinterpret_cast<Graph*>(instance);
  for (const Task& task : graph->tasks) enqueue(of(stream), task);
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

// cuBLAS: handles and descriptors are created and destroyed, products are counted.

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
