// The one inner product of this library: a few rows times a panel of kPanel columns, accumulated in registers.
//
// Every result is a single chain of fused multiply-adds over k = 0, 1, 2, ... whatever the number of rows of the tile, so a row's
// bits do not depend on its neighbours. bf16 weights are widened in registers: on CPUs whose bf16 dot product takes two cycles
// (Sapphire Rapids and kin) float32 multiply-adds do twice its work, and the sum is rounded once a step instead of twice.
//
// Legend: M rows of a tile, K length of the sum.
#pragma once

#include "simd.h"

namespace rs {

// Where the next panel lies, and how far to walk through it at each k: a panel that is read by t tiles brings 1/t of the next one in
// each, so that memory never waits for arithmetic.
struct NextPanel {
  const char* at;
  int64_t step_bytes;
};

// Prefetches the next panel into L2, and this one, a few rows ahead, from there into L1.
template <class T>
inline void prefetch_panels(const T* panel, NextPanel& next) {
  constexpr int kRowBytes = kPanel * (int)sizeof(T), kAhead = 512;
#pragma GCC unroll 2
  for (int byte = 0; byte < kRowBytes; byte += 64) {
    __builtin_prefetch(next.at + byte, 0, 2);
    __builtin_prefetch((const char*)panel + kAhead + byte, 0, 3);
  }
  next.at += next.step_bytes;
}

// acc[r] += sum_k rows[r * RowStride + k * KStride] * panel[k * panel_stride + :]. With `next`, panels stream from memory.
template <int M, int RowStride, int KStride, class T>
inline __attribute__((always_inline)) void accumulate(
    const float* rows, const T* panel, int64_t panel_stride, int64_t length, Vec (&acc)[M][2], NextPanel* next = nullptr) {
#pragma GCC unroll 2
  for (int64_t k = 0; k < length; ++k) {
    Vec a, b;
    load_pair(panel, a, b);
    if (next) prefetch_panels(panel, *next);
#pragma GCC unroll 16
    for (int r = 0; r < M; ++r) {
      const Vec x = splat(rows[r * RowStride]);
      acc[r][0] = fma(a, x, acc[r][0]);
      acc[r][1] = fma(b, x, acc[r][1]);
    }
    rows += KStride;
    panel += panel_stride;
  }
}

// Calls body.template operator()<M>() for the run-time row count: 1 <= rows <= kMaxRows.
template <int M = kMaxRows, class Body>
inline void with_rows(int64_t rows, Body&& body) {
  if constexpr (M == 1) {
    body.template operator()<1>();
  } else {
    if (rows == M) return body.template operator()<M>();
    with_rows<M - 1>(rows, body);
  }
}

// Tiles of nearly equal size: rows [begin, begin + size) of tile t of `count` rows.
struct Tiles {
  int64_t rows, count;
  explicit Tiles(int64_t num_rows) : rows(num_rows), count((num_rows + kMaxRows - 1) / kMaxRows) {}
  int64_t begin(int64_t tile) const { return tile * rows / count; }
  int64_t size(int64_t tile) const { return begin(tile + 1) - begin(tile); }
};

// Floats a packed tile of `length` takes: pack_rows writes whole vectors, so the last one may run over the end.
inline int64_t packed_floats(int64_t rows, int64_t length) { return rows * length + kLanes; }

// packed[k * num_rows + r] = row_at(r)[k], widened to float32.
template <class RowAt>
inline void pack_rows(RowAt row_at, int64_t num_rows, int64_t length, float* packed) {
  VecWord block[kLanes];
  for (int64_t k = 0; k < length; k += kLanes) {
    const int64_t here = length - k < kLanes ? length - k : kLanes;
    for (int64_t r = 0; r < kLanes; ++r) block[r] = r < num_rows ? (VecWord)load_first(row_at(r) + k, here) : VecWord{};
    transpose(block);
    for (int64_t i = 0; i < here; ++i) store_bytes(packed + (k + i) * num_rows, block[i]);
  }
}

}  // namespace rs
