// The device: its memory, its streams with their queued tasks, and the known kernels.

#pragma once

#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "execute.hpp"

namespace {

constexpr int kMultiprocessors = 132;             // of an H100
constexpr size_t kSharedOfBlock = 48 << 10;       // available to a kernel by default
constexpr size_t kSharedOptIn = 227 << 10;        // available on request
constexpr size_t kSharedOfMultiprocessor = 228 << 10;
constexpr size_t kL2 = 50 << 20;

constexpr unsigned kTasksInOrder = 500;  // average number of tasks until the order of the streams changes

enum class Kind { kDevice, kPinned };

struct Memory {
  size_t size;
  Kind kind;
};

struct Function {
  std::string name;
  size_t shared_limit = kSharedOfBlock;
  const char* module = nullptr;      // fat binary or PTX
  const Kernel* kernel = nullptr;    // set once it is translated
};

using Task = std::function<void()>;

struct Graph {
  size_t num_kernels = 0;
  size_t num_copies = 0;
  std::vector<Task> tasks{};
};

struct Event {
  unsigned long long recorded = 0, reached = 0;
};

struct Queued {
  Task run;
  const Event* event = nullptr;  // that must be reached first
  unsigned long long version = 0;
};

struct Stream {
  Graph* captured = nullptr;
  unsigned long long capture_id = 0;
  std::deque<Queued> queue{};
  bool is_running = false;
  unsigned rank = 0;  // the stream with the lowest rank runs first
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
Stream default_stream;
std::set<Stream*> streams{&default_stream};
std::condition_variable_any has_ended;
unsigned long long num_captures = 0;
int num_capturing = 0;
size_t num_bytes_taken = 0;
std::map<std::string, unsigned long long> counts;
thread_local cudaError_t last_error = cudaSuccess;
thread_local Launch pushed;
thread_local cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;

void count(const std::string& what, unsigned long long by = 1) {
  Guard guard(mutex);
  counts[what] += by;
}

cudaError_t refuse(cudaError_t error, const std::string& why) {
  fprintf(stderr, "emulated GPU: %s\n", why.c_str());
  count("refused");
  return last_error = error;
}

size_t num_bytes() {
  static const size_t bytes = (getenv("EMULATED_GIB") ? strtoull(getenv("EMULATED_GIB"), nullptr, 10) : 80ull) << 30;
  return bytes;
}

int major() {
  static const int number = getenv("EMULATED_MAJOR") ? atoi(getenv("EMULATED_MAJOR")) : 9;
  return number;
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

// Queued tasks run as late as possible, on the thread that waits for them. For a while, one random stream runs before
// the others. So reads that come too early and overwrites that come too early are found.

bool runs_kernels() {
  static const bool does = getenv("EMULATED_KERNELS") != nullptr;
  return does;
}

Stream* next_stream() {  // whose first task may run, or nullptr
  static std::mt19937 random(getenv("EMULATED_SEED") ? atoi(getenv("EMULATED_SEED")) : 0);
  if (random() % kTasksInOrder == 0) {
    for (Stream* stream : streams) stream->rank = random();
  }
  Stream* first = nullptr;
  for (Stream* stream : streams) {
    if (stream->is_running || stream->queue.empty()) continue;
    const Queued& next = stream->queue.front();
    bool may_run = !next.event || next.event->reached >= next.version;
    if (may_run && (!first || stream->rank < first->rank)) first = stream;
  }
  return first;
}

template <class F>
void run_until(F is_done, int most = -1) {
  std::unique_lock<std::recursive_mutex> lock(mutex);
  while (most-- && !is_done()) {
    Stream* stream = next_stream();
    if (!stream && most >= 0) return;
    if (!stream) {
      bool is_any_running = std::ranges::any_of(streams, [](Stream* one) { return one->is_running; });
      if (!is_any_running) {
        fprintf(stderr, "emulated GPU: the host waits for an event that can never occur\n");
        abort();
      }
      has_ended.wait(lock);
      continue;
    }
    Task task = std::move(stream->queue.front().run);
    stream->queue.pop_front();
    stream->is_running = true;
    lock.unlock();
    if (task) task();
    lock.lock();
    stream->is_running = false;
    has_ended.notify_all();
  }
}

void run_one() { run_until([] { return false; }, 1); }

bool is_idle(const Stream& stream) { return stream.queue.empty() && !stream.is_running; }

bool are_all_idle() {
  return std::ranges::all_of(streams, [](Stream* one) { return is_idle(*one); });
}

void enqueue(Stream& stream, Task task) {
  Guard guard(mutex);
  if (stream.captured) stream.captured->tasks.push_back(std::move(task));
  else stream.queue.push_back({std::move(task)});
}

template <class F>
cudaError_t wait(const char* what, F is_done) {
  count(std::string("wait: ") + what);
  if (num_capturing && capture_mode != cudaStreamCaptureModeRelaxed)
    return refuse(cudaErrorStreamCaptureUnsupported, "the host waits while a graph is captured");
  run_until(is_done);
  return cudaSuccess;
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
  if (runs_kernels() && size <= (256 << 20)) memset(memory, emulated::kNeverWritten, size);
  *pointer = memory;
  return cudaSuccess;
}

cudaError_t give_back(void* pointer) {
  if (!pointer) return cudaSuccess;
  run_until(are_all_idle);
  Guard guard(mutex);
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
  if (stream.captured) stream.captured->num_copies++;
  if (!runs_kernels()) {
    if (!is_to_device && !stream.captured && source && source->kind == Kind::kDevice) {
      memset(to, 0, size);
    } else if (!is_to_device && !stream.captured) {
      memmove(to, from, size);
    }
  } else if (!source) {  // the bytes are read before the call returns
    auto bytes = std::make_shared<std::vector<char>>(static_cast<const char*>(from), static_cast<const char*>(from) + size);
    enqueue(stream, [=] { memcpy(to, bytes->data(), size); });
  } else {
    enqueue(stream, [=] { memmove(to, from, size); });
  }
  if (runs_kernels() && !target) run_until([&] { return is_idle(stream); });
  return cudaSuccess;
}

cudaError_t fill(void* to, int value, size_t size, cudaStream_t where) {
  size_t left = size;
  find(to, &left);
  if (left < size) return refuse(cudaErrorInvalidValue, "memory is filled beyond its end");
  if (of(where).captured) of(where).captured->num_copies++;
  if (runs_kernels()) enqueue(of(where), [=] { memset(to, value, size); });
  return cudaSuccess;
}

// A kernel is translated at its first launch, by a program that gets the path of its PTX.

std::string ptx_of(const char* module, const std::string& name) {
  if (strncmp(module, "\x50\xed\x55\xba", 4)) return module;
  uint64_t size;
  memcpy(&size, module + 8, 8);
  std::string entry = ".entry " + name + "(";
  for (const char* place = module + 16; place < module + 16 + size;) {
    uint16_t kind;
    uint32_t head;
    uint64_t bytes;
    memcpy(&kind, place, 2), memcpy(&head, place + 4, 4), memcpy(&bytes, place + 8, 8);
    if (kind == 1 && memmem(place + head, bytes, entry.data(), entry.size())) return {place + head, bytes};
    place += head + bytes;
  }
  return "";
}

const Kernel* translated(const Function& function) {
  std::string text = function.module ? ptx_of(function.module, function.name) : "";
  while (!text.empty() && !text.back()) text.pop_back();
  if (text.empty()) return nullptr;
  std::string base = std::string(getenv("EMULATED_KERNELS")) + "/" + std::to_string(std::hash<std::string>()(text)) + "-" +
                     std::to_string(std::hash<std::string>()(function.name));
  std::string library = base + ".so";
  if (access(library.c_str(), R_OK)) {
    std::string own = base + "." + std::to_string(getpid());
    std::ofstream(own + ".ptx") << text;
    std::string command = std::string(getenv("EMULATED_TRANSLATOR")) + " " + own + ".ptx '" + function.name + "' " + own + ".so";
    if (system(command.c_str())) return nullptr;
    rename((own + ".so").c_str(), library.c_str());
  }
  void* handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!handle) fprintf(stderr, "emulated GPU: %s\n", dlerror());
  return handle ? static_cast<const Kernel*>(dlsym(handle, "translated")) : nullptr;
}

Task task_of(Function& function, const Launch& how, void** arguments) {
  if (function.name.find("spin_kernel") != std::string::npos) {
    int64_t cycles = *static_cast<int64_t*>(arguments[0]);
    return [=] { std::this_thread::sleep_for(std::chrono::nanoseconds(cycles / 2)); };
  }
  if (!function.kernel) function.kernel = translated(function);
  if (!function.kernel) return nullptr;
  std::vector<uint8_t> values(function.kernel->parameters_size + 16);
  for (uint32_t i = 0; i < function.kernel->num_parameters; ++i) {
    auto [offset, size] = function.kernel->parameters[i];
    memcpy(values.data() + offset, arguments[i], size);
  }
  auto [grid, block, shared, stream] = how;
  return [=, &function]() mutable {
    emulated::run(*function.kernel, function.name.c_str(), {grid.x, grid.y, grid.z}, {block.x, block.y, block.z},
                  shared, values.data());
  };
}

cudaError_t launch(const void* function, const Launch& how, void** arguments) {
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
  if (runs_kernels()) {
    Task task = found == functions.end() ? nullptr : task_of(found->second, how, arguments);
    if (!task) return refuse(cudaErrorInvalidKernelImage, name + " has no PTX");
    enqueue(stream, std::move(task));
  }
  return cudaSuccess;
}

int multiply() {  // cuBLAS keeps its stream in a handle; here it only matters whether a graph is being captured
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
