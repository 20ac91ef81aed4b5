// Runs a translated kernel: each thread of a grid is a coroutine on the calling host thread.

#pragma once

#include <signal.h>
#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <deque>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "machine.hpp"

extern "C" void emulated_switch(void** from, void* to);

asm(R"(
.text
.globl emulated_switch
.type emulated_switch, @function
emulated_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");

namespace emulated {

constexpr size_t kStackBytes = 256 << 10;
constexpr uint8_t kNeverWritten = 0xff;  // a NaN in every format
constexpr size_t kManyLooks = 1000;      // polls per polling block, after which the launch fails

// State of the kernel that this host thread runs.
inline thread_local const char* name;
inline thread_local const Kernel* kernel;
inline thread_local uint8_t* parameters;
inline thread_local Thread* current;
inline thread_local void* scheduler;
inline thread_local std::vector<uint8_t*> free_stacks;

[[noreturn]] inline void fail(const char* why) {
  Dim3 at = current->block->index;
  fprintf(stderr, "emulated GPU: %s: %s (block %u, %u, %u; thread %u)\n", name, why, at.x, at.y, at.z, current->order);
  abort();
}

inline void on_fault(int, siginfo_t* about, void*) {
  char why[80];
  snprintf(why, sizeof why, "it uses memory that is not there, at %p", about->si_addr);
  fail(why);
}

inline void leave(Thread& thread) { emulated_switch(&thread.stack_pointer, scheduler); }

inline void wake_block(Thread& thread) {
  Thread* first = &thread - thread.order;
  for (uint32_t i = 0; i < thread.num_threads(); i += 32) Thread::wake(*first[i].warp, ~0u);
}

template <int columns>
void multiply_by(float* sums, const float* left, const float* right) {
  for (int row = 0; row < 16; ++row) {
    float total[columns] = {};
    for (int k = 0; k < 16; ++k) {
      for (int i = 0; i < columns; ++i) total[i] += left[row * 16 + k] * right[k * columns + i];
    }
    memcpy(sums + row * columns, total, sizeof total);
  }
}

inline void multiply(float* sums, const float* left, const float* right, int columns) {
  switch (columns) {
    case 8: return multiply_by<8>(sums, left, right);
    case 32: return multiply_by<32>(sums, left, right);
    case 64: return multiply_by<64>(sums, left, right);
    case 96: return multiply_by<96>(sums, left, right);
    case 128: return multiply_by<128>(sums, left, right);
    case 256: return multiply_by<256>(sums, left, right);
    default: fail("products of this shape are not emulated");
  }
}

constexpr Host kHost{leave, wake_block, fail, multiply};

[[noreturn]] inline void begin() {
  kernel->run(*current, parameters);
  current->end();
  leave(*current);
  abort();
}

inline bool misses_turn() {  // as on a GPU, where other warps may be scheduled first
  static const unsigned percent = getenv("EMULATED_SKEW") ? atoi(getenv("EMULATED_SKEW")) : 0;
  static std::minstd_rand random(1);
  return percent && random() % 100 < percent;
}

class RunningBlock {
 public:
  enum class Stop { kEnded, kLooking, kStuck };

  RunningBlock(const Shape& shape, Dim3 index) : shared_(nullptr, free) {
    uint32_t count = shape.block.x * shape.block.y * shape.block.z;
    size_t bytes = (shape.first_dynamic_shared + shape.dynamic_shared + 1023) / 1024 * 1024;
    shared_.reset(static_cast<uint8_t*>(aligned_alloc(1024, bytes)));
    memset(shared_.get(), kNeverWritten, bytes);
    block_ = {index, shared_.get(), count, {}};
    threads_.resize(count);
    warps_.resize((count + 31) / 32);
    for (uint32_t i = 0; i < count; ++i) {
      Dim3 place{i % shape.block.x, i / shape.block.x % shape.block.y, i / shape.block.x / shape.block.y};
      Warp& warp = warps_[i / 32];
      threads_[i] = {new_stack(), &kHost, &shape, &block_, &warp, place, i % 32, i};
      warp.lanes[i % 32] = &threads_[i];
      warp.live |= threads_[i].bit();
    }
    for (Warp& warp : warps_) warp.ready = warp.live;
  }

  ~RunningBlock() { free_stacks.insert(free_stacks.end(), stacks_.begin(), stacks_.end()); }

  Stop run() {  // until all its threads have ended, or none can continue
    for (;;) {
      bool went_on = false, is_looking = false, is_left = false;
      for (Warp& warp : warps_) {  // in turn: each until its lanes wait or are about to write
        if (misses_turn()) {
          went_on = is_left = true;
          continue;
        }
        went_on |= (warp.ready | warp.writing) != 0;
        go_on(warp, warp.ready | std::exchange(warp.writing, 0));
        while (warp.ready) go_on(warp, warp.ready);
        uint32_t looking = std::exchange(warp.looking, 0);
        go_on(warp, looking);
        went_on |= (looking & ~warp.looking) != 0;
        is_looking |= warp.looking != 0;
        is_left |= warp.live != 0;
      }
      if (!is_left) return Stop::kEnded;
      if (!went_on) return is_looking ? Stop::kLooking : Stop::kStuck;
    }
  }

 private:
  Block block_;
  std::vector<Thread> threads_;
  std::vector<Warp> warps_;
  std::vector<uint8_t*> stacks_;
  std::unique_ptr<uint8_t, void (*)(void*)> shared_;

  static void go_on(Warp& warp, uint32_t lanes) {
    for (warp.ready &= ~lanes; lanes; lanes &= lanes - 1) {
      current = warp.lanes[std::countr_zero(lanes)];
      emulated_switch(&scheduler, current->stack_pointer);
    }
  }

  void* new_stack() {  // in the state of a call of `begin` that was switched out
    if (free_stacks.empty()) {
      int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
      free_stacks.push_back(
          static_cast<uint8_t*>(mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, flags, -1, 0)));
    }
    stacks_.push_back(free_stacks.back());
    free_stacks.pop_back();
    auto** top = reinterpret_cast<void**>(stacks_.back() + kStackBytes - 64);
    *--top = nullptr;
    *--top = reinterpret_cast<void*>(begin);
    return top - 6;  // registers whose values are never read
  }
};

inline void run(const Kernel& which, const char* its_name, Dim3 grid, Dim3 block, uint32_t dynamic_shared, uint8_t* values) {
  name = its_name, kernel = &which, parameters = values;
  struct sigaction before, ours{};
  ours.sa_sigaction = on_fault;
  ours.sa_flags = SA_SIGINFO;
  sigaction(SIGSEGV, &ours, &before);
  Shape shape{grid, block, dynamic_shared, which.first_dynamic_shared};
  std::deque<std::unique_ptr<RunningBlock>> looking;  // blocks that poll for other blocks
  uint64_t count = uint64_t(grid.x) * grid.y * grid.z, next = 0;
  size_t num_looks = 0;  // since a block last ended
  while (next < count || !looking.empty()) {
    std::unique_ptr<RunningBlock> one;
    if (next < count && num_looks >= looking.size()) {
      uint32_t i = next++;
      one = std::make_unique<RunningBlock>(shape, Dim3{i % grid.x, i / grid.x % grid.y, i / grid.x / grid.y});
    } else {
      one = std::move(looking.front());
      looking.pop_front();
    }
    switch (one->run()) {
      case RunningBlock::Stop::kEnded: num_looks = 0; break;
      case RunningBlock::Stop::kStuck: fail("its threads wait for each other");
      case RunningBlock::Stop::kLooking:
        looking.push_back(std::move(one));
        if (++num_looks > kManyLooks * (looking.size() + 1) && next == count) fail("it polls for a value that is never written");
    }
  }
  sigaction(SIGSEGV, &before, nullptr);
}

}  // namespace emulated
