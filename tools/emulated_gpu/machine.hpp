// A GPU thread, as seen by a translated kernel: its memory, and the operations that it does with other threads.
//
// A thread is a coroutine. It runs until it must wait for other threads of its warp or block; the last to arrive does
// the work of all and wakes them. Copies and products that are asynchronous on a GPU are done immediately.
// Source: NVIDIA, PTX ISA 9.0; for the layouts of wgmma's operands, the comments on descriptors in CUTLASS.

#pragma once

#include "numbers.hpp"

struct Tf32 {};

struct Thread;

struct Dim3 {
  uint32_t x, y, z;
};

struct Warp {  // sets of lanes, as bits
  uint32_t live = 0;     // not ended; of these:
  uint32_t ready = 0;    // may continue,
  uint32_t writing = 0;  // are about to write,
  uint32_t looking = 0;  // poll for something that does not wake them,
  uint32_t blocked = 0;  // wait to be woken; of these:
  uint32_t waiting = 0;  // wait for other lanes of the warp
  Thread* lanes[32] = {};
  void* arguments[32] = {};
};

struct Barrier {
  uint32_t arrived = 0;
  bool is_any = false, was_any = false;
  uint64_t generation = 0;
};

struct Arrivals {  // a barrier in shared memory
  uint32_t phase : 1;
  uint32_t expected : 15;
  uint16_t left;
  int32_t bytes;  // not yet arrived
};

struct TileMap {  // our contents of a CUtensorMap, innermost dimension first
  uint8_t* address;
  uint64_t size[5], stride[4];  // strides in bytes, without the innermost
  uint32_t box[5];
  uint8_t element, swizzle;
};

static_assert(sizeof(Arrivals) == 8 && sizeof(TileMap) <= 128);

struct Block {
  Dim3 index;
  uint8_t* shared;
  uint32_t num_live;
  Barrier barriers[16];
};

struct Shape {  // of a launch
  Dim3 grid, block;
  uint32_t dynamic_shared, first_dynamic_shared;
};

struct Host {  // functions that the runner of a thread provides
  void (*leave)(Thread&);
  void (*wake_block)(Thread&);
  void (*fail)(const char*);
  void (*multiply)(float* sums, const float* left, const float* right, int columns);  // 16 x 16 by 16 x columns
};

struct Thread {
  void* stack_pointer;
  const Host* host;
  const Shape* shape;
  Block* block;
  Warp* warp;
  Dim3 index;
  uint32_t lane, order;  // index in the warp, and in the block

  // Special registers.
  uint32_t tid_x() { return index.x; }
  uint32_t tid_y() { return index.y; }
  uint32_t tid_z() { return index.z; }
  uint32_t ntid_x() { return shape->block.x; }
  uint32_t ntid_y() { return shape->block.y; }
  uint32_t ntid_z() { return shape->block.z; }
  uint32_t ctaid_x() { return block->index.x; }
  uint32_t ctaid_y() { return block->index.y; }
  uint32_t ctaid_z() { return block->index.z; }
  uint32_t nctaid_x() { return shape->grid.x; }
  uint32_t nctaid_y() { return shape->grid.y; }
  uint32_t nctaid_z() { return shape->grid.z; }
  uint32_t laneid() { return lane; }
  uint32_t lanemask_ge() { return ~0u << lane; }
  uint32_t cluster_ctaid_x() { return 0; }
  uint32_t cluster_ctaid_y() { return 0; }
  uint32_t cluster_ctaid_z() { return 0; }
  uint32_t cluster_ctarank() { return 0; }

  uint32_t num_threads() { return shape->block.x * shape->block.y * shape->block.z; }
  uint32_t first_dynamic_shared() { return shape->first_dynamic_shared; }
  uint8_t* shared(uint32_t offset) { return block->shared + offset; }
  uint64_t shared_offset(uint64_t address) { return address - reinterpret_cast<uint64_t>(block->shared); }
  void fail(const char* why) { host->fail(why); }

  // Scheduling.

  uint32_t bit() { return 1u << lane; }

  void before_write() {  // all lanes of a warp read before any of them writes, as in lockstep
    warp->writing |= bit();
    host->leave(*this);
  }

  void look_again() {  // let other threads run before polling again
    warp->looking |= bit();
    host->leave(*this);
  }

  void block_until_woken() {
    warp->blocked |= bit();
    host->leave(*this);
  }

  static void wake(Warp& warp, uint32_t lanes) {
    warp.ready |= warp.blocked & lanes;
    warp.blocked &= ~lanes;
  }

  void end() {  // threads that wait for all remaining threads check again
    warp->live &= ~bit();
    block->num_live--;
    wake(*warp, warp->waiting);
    bool is_awaited = std::ranges::any_of(block->barriers, [](const Barrier& one) { return one.arrived > 0; });
    if (is_awaited) host->wake_block(*this);
  }

  template <class Argument, class F>
  void together(uint32_t mask, Argument& mine, F work) {  // the last lane to arrive does the work of all lanes of a mask
    warp->arguments[lane] = &mine;
    warp->waiting |= bit();
    while (warp->waiting & bit()) {
      uint32_t all = mask & warp->live;
      if ((warp->waiting & all) != all) {
        block_until_woken();
        continue;
      }
      Argument* arguments[32] = {};
      for (uint32_t left = all; left; left &= left - 1) {
        int i = std::countr_zero(left);
        arguments[i] = static_cast<Argument*>(warp->arguments[i]);
      }
      work(arguments, all);
      warp->waiting &= ~all;
      wake(*warp, all & ~bit());
    }
  }

  void sync_warp(uint32_t mask) {
    int nothing = 0;
    together(mask, nothing, [](int**, uint32_t) {});
  }

  uint32_t elect(uint32_t mask) {
    sync_warp(mask);
    return std::countr_zero(mask & warp->live);
  }

  bool wait_at(uint32_t id, uint32_t count, bool is_any) {  // count 0 means all threads of the block
    Barrier& here = block->barriers[id];
    uint64_t generation = here.generation;
    here.arrived++;
    here.is_any |= is_any;
    while (here.generation == generation) {
      if (here.arrived >= (count ? count : block->num_live)) pass(here);
      else block_until_woken();
    }
    return here.was_any;
  }

  void arrive(uint32_t id, uint32_t count) {
    Barrier& here = block->barriers[id];
    if (++here.arrived >= count) pass(here);
  }

  void pass(Barrier& here) {
    here.was_any = here.is_any;
    here.is_any = false;
    here.arrived = 0;
    here.generation++;
    host->wake_block(*this);
  }

  void barrier(uint32_t id, uint32_t count) { wait_at(id, count, false); }
  bool barrier_any(uint32_t id, bool mine) { return wait_at(id, 0, mine); }

  // Exchanges within a warp.

  struct Shuffled {
    uint32_t value, by, range;
    bool is_inside;
  };

  template <class F>
  uint32_t shuffle(uint32_t value, uint32_t by, uint32_t range, uint32_t mask, bool& is_inside, F source_of) {
    Shuffled mine{value, by, range, false};
    together(mask, mine, [&](Shuffled** all, uint32_t which) {
      uint32_t values[32];
      for (int i = 0; i < 32; ++i) values[i] = all[i] ? all[i]->value : 0;
      for (uint32_t left = which; left; left &= left - 1) {
        int i = std::countr_zero(left);
        int segment = all[i]->range >> 8 & 31;
        int last = (i & segment) | (all[i]->range & 31 & ~segment);  // last lane that may be read; for up, the first
        auto [source, is_there] = source_of(i, int(all[i]->by & 31), segment, last);
        all[i]->is_inside = is_there;
        all[i]->value = values[is_there ? source : i];
      }
    });
    is_inside = mine.is_inside;
    return mine.value;
  }

  struct Source {
    int lane;
    bool is_there;
  };

  uint32_t shfl_up(uint32_t value, uint32_t by, uint32_t range, uint32_t mask, bool& is_inside) {
    auto source = [](int i, int by, int, int first) { return Source{i - by, i - by >= first}; };
    return shuffle(value, by, range, mask, is_inside, source);
  }

  uint32_t shfl_down(uint32_t value, uint32_t by, uint32_t range, uint32_t mask, bool& is_inside) {
    auto source = [](int i, int by, int, int last) { return Source{i + by, i + by <= last}; };
    return shuffle(value, by, range, mask, is_inside, source);
  }

  uint32_t shfl_bfly(uint32_t value, uint32_t by, uint32_t range, uint32_t mask, bool& is_inside) {
    auto source = [](int i, int by, int, int last) { return Source{i ^ by, (i ^ by) <= last}; };
    return shuffle(value, by, range, mask, is_inside, source);
  }

  uint32_t shfl_idx(uint32_t value, uint32_t by, uint32_t range, uint32_t mask, bool& is_inside) {
    auto source = [](int i, int by, int segment, int last) {
      int chosen = (i & segment) | (by & ~segment);
      return Source{chosen, chosen <= last};
    };
    return shuffle(value, by, range, mask, is_inside, source);
  }

  template <class T>
  T redux_max(T value, uint32_t mask) {
    return redux(value, mask, [](T a, T b) { return std::max(a, b); });
  }

  template <class T>
  T redux_min(T value, uint32_t mask) {
    return redux(value, mask, [](T a, T b) { return std::min(a, b); });
  }

  template <class T, class F>
  T redux(T value, uint32_t mask, F combine) {
    together(mask, value, [&](T** all, uint32_t which) {
      T result = *all[std::countr_zero(which)];
      for (uint32_t left = which; left; left &= left - 1) result = combine(result, *all[std::countr_zero(left)]);
      for (uint32_t left = which; left; left &= left - 1) *all[std::countr_zero(left)] = result;
    });
    return value;
  }

  // Copies.

  void copy(uint8_t* to, const uint8_t* from, uint32_t size, uint32_t filled) {
    memcpy(to, from, std::min(size, filled));
    if (filled < size) memset(to + filled, 0, size - filled);
  }

  template <int rank>
  void copy_tile(uint8_t* to, const uint8_t* map, std::array<int32_t, rank> corner, uint8_t* barrier) {
    TileMap tiles;
    memcpy(&tiles, map, sizeof tiles);
    uint32_t count = 1;
    for (int i = 0; i < rank; ++i) count *= tiles.box[i];
    for (uint32_t i = 0; i < count; ++i) {
      const uint8_t* from = tiles.address;
      bool is_inside = true;
      uint32_t left = i;
      for (int axis = 0; axis < rank; ++axis) {
        int64_t place = corner[axis] + int64_t(left % tiles.box[axis]);
        left /= tiles.box[axis];
        is_inside &= place >= 0 && place < int64_t(tiles.size[axis]);
        from += place * int64_t(axis ? tiles.stride[axis - 1] : tiles.element);
      }
      uint8_t* target = swizzled(reinterpret_cast<uint64_t>(to) + i * tiles.element, tiles.swizzle);
      is_inside ? memcpy(target, from, tiles.element) : memset(target, 0, tiles.element);
    }
    mbarrier_change(barrier, 0, -int32_t(count * tiles.element));
  }

  static uint8_t* swizzled(uint64_t address, uint32_t bits) {  // rows of 128 bytes: 3 bits, of 64: 2, of 32: 1
    return reinterpret_cast<uint8_t*>(address ^ (((address >> 7) & ((1u << bits) - 1)) << 4));
  }

  void mbarrier_init(uint8_t* place, uint32_t count) {
    *reinterpret_cast<Arrivals*>(place) = {0, count, uint16_t(count), 0};
  }

  void mbarrier_arrive(uint8_t* place, int32_t expected) { mbarrier_change(place, 1, expected); }

  void mbarrier_change(uint8_t* place, uint32_t arrived, int32_t bytes) {
    auto& here = *reinterpret_cast<Arrivals*>(place);
    here.left -= arrived;
    here.bytes += bytes;
    if (here.left || here.bytes) return;
    here.left = here.expected;
    here.phase ^= 1;
  }

  bool mbarrier_try_wait(uint8_t* place, uint32_t parity) {
    const auto& here = *reinterpret_cast<Arrivals*>(place);
    if (here.phase == parity) look_again();
    return here.phase != parity;
  }

  // 8 x 8 matrices of 16-bit numbers: a thread holds the address of a row, or two consecutive numbers.

  template <int count>
  struct Matrices {
    uint8_t* row;
    std::array<uint32_t, count> values;
  };

  template <int count, bool is_transposed>
  std::array<uint32_t, count> ldmatrix(uint8_t* row) {
    Matrices<count> mine{row, {}};
    together(~0u, mine, [](Matrices<count>** all, uint32_t) {
      for (int i = 0; i < 32 * count; ++i) {
        int matrix = i / 32, lane = i % 32, first = lane % 4 * 2;
        auto value = [&](int column) {
          auto [r, c] = is_transposed ? std::pair(column, lane / 4) : std::pair(lane / 4, column);
          return uint32_t(load<uint16_t, 1>(all[8 * matrix + r]->row + 2 * c)[0]);
        };
        all[lane]->values[matrix] = value(first + 1) << 16 | value(first);
      }
    });
    return mine.values;
  }

  template <int count>
  void stmatrix(uint8_t* row, std::array<uint32_t, count> values) {
    Matrices<count> mine{row, values};
    together(~0u, mine, [](Matrices<count>** all, uint32_t) {
      for (int i = 0; i < 32 * count; ++i) {
        int matrix = i / 32, lane = i % 32;
        store<uint32_t, 1>(all[8 * matrix + lane / 4]->row + 4 * (lane % 4), {all[lane]->values[matrix]});
      }
    });
  }

  // Products. A warp's part of A is 16 x 16, four registers per thread; of the sums, 16 x 8 per four registers.

  using Four = std::array<uint32_t, 4>;

  template <class T>
  static void spread(float (&left)[16][16], int lane, const Four& a) {
    for (int r = 0; r < 4; ++r) {
      auto two = as<Pair<T>>(a[r]);
      float* at = &left[lane / 4 + 8 * (r % 2)][lane % 4 * 2 + 8 * (r / 2)];
      at[0] = number(two.x), at[1] = number(two.y);
    }
  }

  template <int columns>
  static float& sum_at(float (&sums)[16][columns], int lane, int r) {
    return sums[lane / 4 + 8 * (r / 2 % 2)][r / 4 * 8 + lane % 4 * 2 + r % 2];
  }

  struct Product {
    Four a;
    std::array<uint32_t, 2> b;
    Four c;
  };

  template <class T>
  Four mma(Four a, std::array<uint32_t, 2> b, Four c) {
    Product mine{a, b, c};
    together(~0u, mine, [this](Product** all, uint32_t) {
      float left[16][16] = {}, right[16][8] = {}, sums[16][8] = {};
      for (int i = 0; i < 32; ++i) {
        if constexpr (std::is_same_v<T, Tf32>) {  // the other half of the columns of A stays zero
          auto cut = [](uint32_t bits) { return as<float>(bits & ~0x1fffu); };
          for (int r = 0; r < 4; ++r) left[i / 4 + 8 * (r % 2)][i % 4 + 4 * (r / 2)] = cut(all[i]->a[r]);
          for (int r = 0; r < 2; ++r) right[i % 4 + 4 * r][i / 4] = cut(all[i]->b[r]);
        } else {
          spread<T>(left, i, all[i]->a);
          for (int r = 0; r < 2; ++r) {
            auto two = as<Pair<T>>(all[i]->b[r]);
            int row = i % 4 * 2 + 8 * r;
            right[row][i / 4] = number(two.x), right[row + 1][i / 4] = number(two.y);
          }
        }
      }
      host->multiply(sums[0], left[0], right[0], 8);
      for (int i = 0; i < 32; ++i) {
        for (int r = 0; r < 4; ++r) {
          all[i]->c[r] = to<uint32_t>(as<float>(all[i]->c[r]) + sum_at(sums, i, r));
        }
      }
    });
    return mine.c;
  }

  struct Operand {  // an operand of wgmma in shared memory: the place of its 16-bit number (n, k)
    uint64_t start;
    uint32_t leading, stride, bits;
    bool is_n_contiguous;

    template <class T>
    float at(int n, int k) const {
      uint32_t width = 16u << bits;  // bytes of a row
      uint64_t place = start;
      if (is_n_contiguous) {
        place += n % (width / 2) * 2 + n / (width / 2) * leading + k % 8 * width + k / 8 * stride;
      } else {
        place += n / 8 * stride + n % 8 * width + k * 2;
      }
      T value;
      memcpy(&value, swizzled(place, bits), sizeof value);
      return number(value);
    }
  };

  Operand operand(uint64_t about, bool is_n_contiguous) {
    uint32_t layout = about >> 62;
    if (!layout) fail("wgmma without swizzled operands is not emulated");
    auto field = [=](int start) { return uint32_t(about >> start & 0x3fff) << 4; };
    return {reinterpret_cast<uint64_t>(shared(field(0))), field(16), field(32), 4 - layout, is_n_contiguous};
  }

  template <int n>
  struct GroupProduct {
    const Four* a;
    std::array<uint32_t, n / 2>* sums;
  };

  template <int n, class T>
  void wgmma(std::array<uint32_t, n / 2>& sums, Four a, uint64_t b, bool is_n_contiguous, bool keeps) {
    wgmma_rows<n, T>(sums, &a, operand(b, is_n_contiguous), keeps, [](float (&left)[16][16], GroupProduct<n>** all) {
      for (int i = 0; i < 32; ++i) spread<T>(left, i, *all[i]->a);
    });
  }

  template <int n, class T>
  void wgmma(std::array<uint32_t, n / 2>& sums, uint64_t a, uint64_t b, bool is_n_contiguous, bool keeps) {
    Operand in_a = operand(a, false);
    int first = order / 32 % 4 * 16;  // of the 64 rows of four warps
    wgmma_rows<n, T>(sums, nullptr, operand(b, is_n_contiguous), keeps, [=](float (&left)[16][16], GroupProduct<n>**) {
      for (int i = 0; i < 256; ++i) left[i / 16][i % 16] = in_a.at<T>(first + i / 16, i % 16);
    });
  }

  template <int n, class T, class F>
  void wgmma_rows(std::array<uint32_t, n / 2>& sums, const Four* a, const Operand& b, bool keeps, F fill_left) {
    GroupProduct<n> mine{a, &sums};
    together(~0u, mine, [&](GroupProduct<n>** all, uint32_t) {
      float left[16][16], right[16][n], products[16][n] = {};
      fill_left(left, all);
      for (int i = 0; i < 16 * n; ++i) right[i / n][i % n] = b.at<T>(i % n, i / n);
      host->multiply(products[0], left[0], right[0], n);
      for (int i = 0; i < 32; ++i) {
        for (int r = 0; r < n / 2; ++r) {
          uint32_t& sum = (*all[i]->sums)[r];
          sum = to<uint32_t>((keeps ? as<float>(sum) : 0.f) + sum_at(products, i, r));
        }
      }
    });
  }
};

// The description of a translated kernel for its launcher.

struct Parameter {
  uint32_t offset, size;
};

struct Kernel {
  void (*run)(Thread&, uint8_t*);
  uint32_t num_parameters;
  const Parameter* parameters;
  uint32_t parameters_size, first_dynamic_shared;
};
