// The threads of a CUDA block: what they compute together, and the team (verification.h) that this makes of them.
//
// Everything is shared memory and __syncthreads(): no warp is assumed, so the same text runs block by block on CPU threads, where it is
// tested (tests/kernels/cuda/on_threads.h). A reduction is nine barriers of a 512-thread block, well below the pass over V it ends.
#pragma once

#include "verification.h"

#ifndef RS_BLOCK_THREADS
#define RS_BLOCK_THREADS 512
#endif

#if !defined(RS_LAUNCH)
#define RS_LAUNCH(kernel, grid, threads, stream, ...) kernel<<<grid, threads, 0, stream>>>(__VA_ARGS__)
#endif

namespace rs {

constexpr int kThreads = RS_BLOCK_THREADS;

// What a block shares: one number or sum a thread, of one kind at a time.
struct alignas(16) BlockMemory {
  char bytes[kThreads * sizeof(RowSums)];
  template <class T>
  __device__ T* of() {
    static_assert(kThreads * sizeof(T) <= sizeof(bytes));
    return reinterpret_cast<T*>(bytes);
  }
};

class Block {
 public:
  __device__ explicit Block(BlockMemory& memory) : memory_(memory), me_(threadIdx.x) {}

  __device__ bool leads() const { return me_ == 0; }
  __device__ void sync() const { __syncthreads(); }
  __device__ bool all(bool mine) { return least(mine ? 1 : 0) == 1; }

  template <class T, class Op>
  __device__ T reduce(const T& own, Op op) {
    T* const shared = memory_.of<T>();
    shared[me_] = own;
    __syncthreads();
    for (int width = kThreads / 2; width > 0; width /= 2) {
      if (me_ < width) shared[me_] = op(shared[me_], shared[me_ + width]);
      __syncthreads();
    }
    const T result = shared[0];
    __syncthreads();
    return result;
  }

  __device__ int64_t least(int64_t own) {
    return reduce(own, [](int64_t a, int64_t b) { return a < b ? a : b; });
  }

  // Inclusive sum over the threads before and me; the sums of all stay in the memory until it is used again.
  __device__ double scan(double own) {
    double* const shared = memory_.of<double>();
    double value = own;
    for (int step = 1; step < kThreads; step *= 2) {
      shared[me_] = value;
      __syncthreads();
      if (me_ >= step) value += shared[me_ - step];
      __syncthreads();
    }
    shared[me_] = value;
    __syncthreads();
    return value;
  }

  __device__ double broadcast(double own, int64_t owner) {
    double* const shared = memory_.of<double>();
    shared[me_] = own;
    __syncthreads();
    const double value = shared[owner];
    __syncthreads();
    return value;
  }

 protected:
  BlockMemory& memory_;
  const int me_;
};

class BlockTeam : public Block {
 public:
  using Block::Block;

  template <bool kChains>
  __device__ RowSums sums(const Law& law, const Stage& next) {
    RowSums own;
    for (int64_t c = me_; c < law.num_columns; c += kThreads) {
      const Terms<float> terms = terms_at(law, next, c);
      own.target += terms.target;
      own.draft += terms.draft;
      own.left += terms.left;
      if (kChains)
        own.shared += terms.shared;
      else
        own.rest += terms.rest;
    }
    RowSums total = reduce(own, [](const RowSums& a, const RowSums& b) {
      return RowSums{a.target + b.target, a.draft + b.draft, a.shared + b.shared, a.left + b.left, a.rest + b.rest};
    });
    total.left += unnamed_left(law, next, total.target);
    return total;
  }

  // The first token whose cumulative weight exceeds uniform * total. Each thread sums a part; the part that holds the level is divided
  // again, until a part is one token. The level stays below the total, and a part without weight is never chosen.
  __device__ int64_t draw(const Law& law, double uniform) {
    int64_t begin = 0, end = law.vocab;
    double level = 0;
    for (bool is_first = true;; is_first = false) {
      const int64_t size = (end - begin + kThreads - 1) / kThreads, from = begin + me_ * size;
      double part = 0;
      for (int64_t v = from; v < from + size && v < end; ++v) part += law.weight(v);
      const double until = scan(part), total = memory_.of<double>()[kThreads - 1];
      if (is_first) {
        if (!(total > 0 && total < INFINITY)) {
          __syncthreads();
          return -1;
        }
        level = uniform * total;
      }
      const double below = ::nextafter(total, 0.0);
      level = level < below ? level : below;
      __syncthreads();
      const int64_t none = kThreads;
      int64_t owner = least(part > 0 && until > level ? me_ : none);
      if (owner == none) owner = none - least(part > 0 ? none - me_ : none);  // the last with weight absorbs rounding
      begin += owner * size;
      end = begin + size < end ? begin + size : end;
      if (size == 1) return begin;
      level -= broadcast(until - part, owner);
    }
  }

  __device__ int64_t race(const float* log_probs, int64_t vocab, const NoiseKey& key) {
    Winner own{-INFINITY, 0};
    for (int64_t block = me_; 8 * block < vocab; block += kThreads) {
      uint64_t words[4];
      philox_block(key, (uint64_t)block, words);
      for (int64_t i = 0; i < 8 && 8 * block + i < vocab; ++i) {
        const uint32_t word = (uint32_t)(words[i / 2] >> (32 * (i % 2)));
        const Winner other{log_probs[8 * block + i] + gumbel_of<float>(word), 8 * block + i};
        if (own.loses_to(other)) own = other;
      }
    }
    return reduce(own, [](const Winner& a, const Winner& b) { return a.loses_to(b) ? b : a; }).index;
  }
};

}  // namespace rs
