// One vector type for every CPU: GCC vector extensions, 16 floats wide with AVX-512, 8 with AVX2, 4 elsewhere.
//
// Nothing here may be compiled with -ffast-math: row invariance rests on every operation having one rounding and one order.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "elementary.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace rs {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
constexpr int kMaxRows = 14;  // 14 x 2 accumulators + 2 weights + 1 broadcast of 32 registers
#elif defined(__AVX2__)
constexpr int kLanes = 8;
constexpr int kMaxRows = 6;  // 6 x 2 + 2 + 1 of 16
#else
constexpr int kLanes = 4;
constexpr int kMaxRows = 6;
#endif
constexpr int kPanel = 2 * kLanes;  // columns of a weight panel, keys of an attention chunk

typedef float Vec __attribute__((vector_size(kLanes * 4)));
typedef int32_t VecInt __attribute__((vector_size(kLanes * 4)));
typedef uint32_t VecWord __attribute__((vector_size(kLanes * 4)));
typedef uint16_t VecHalf __attribute__((vector_size(kLanes * 2)));

struct bf16 {
  uint16_t bits;
};

template <class V>
inline V load_bytes(const void* from) {
  V value;
  std::memcpy(&value, from, sizeof(V));
  return value;
}

template <class V>
inline void store_bytes(void* to, V value) {
  std::memcpy(to, &value, sizeof(V));
}

inline Vec splat(float x) { return x - Vec{}; }  // x - 0 is x for every x (x + 0 is not: -0), so it compiles to a broadcast

// a * b + c with one rounding where the machine has it.
inline Vec fma(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
  return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

template <>
struct Lanes<Vec> {
  typedef VecInt Int;
  typedef VecWord Word;
  static Vec splat(float x) { return rs::splat(x); }
  static Vec of(VecInt x) { return __builtin_convertvector(x, Vec); }
  static Vec of(VecWord x) { return __builtin_convertvector(x, Vec); }
  static Vec fma(Vec a, Vec b, Vec c) { return rs::fma(a, b, c); }
};

inline VecInt iota() {
  VecInt lanes;
  for (int i = 0; i < kLanes; ++i) lanes[i] = i;
  return lanes;
}

// Larger of the two; NaN in b is dropped, NaN in a is kept out by the comparison too, so callers test for NaN themselves.
inline Vec larger(Vec a, Vec b) { return b > a ? b : a; }

// Round to nearest even, as torch does; NaN stays NaN.
inline VecWord bf16_bits(Vec x) {
  VecWord bits = (VecWord)x;
  VecWord rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return (VecWord)(x == x ? (VecInt)rounded : VecInt{} + 0x7fc0);
}

inline Vec load(const float* from) { return load_bytes<Vec>(from); }
inline Vec load(const bf16* from) { return (Vec)(__builtin_convertvector(load_bytes<VecHalf>(from), VecWord) << 16); }
inline void store(float* to, Vec x) { store_bytes(to, x); }
inline void store(bf16* to, Vec x) { store_bytes(to, __builtin_convertvector(bf16_bits(x), VecHalf)); }

// The first n lanes; the others are zero.
template <class T>
inline Vec load_first(const T* from, int64_t n) {
  if (n >= kLanes) return load(from);
  T padded[kLanes] = {};
  std::memcpy(padded, from, n * sizeof(T));
  return load(padded);
}

template <class T>
inline void store_first(T* to, Vec x, int64_t n) {
  if (n >= kLanes) return store(to, x);
  T padded[kLanes];
  store(padded, x);
  std::memcpy(to, padded, n * sizeof(T));
}

// x as it would be after a trip through memory in type T.
template <class T>
inline Vec rounded_to(Vec x);
template <>
inline Vec rounded_to<float>(Vec x) { return x; }
template <>
inline Vec rounded_to<bf16>(Vec x) { return (Vec)(bf16_bits(x) << 16); }

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) {
  uint32_t bits = (uint32_t)x.bits << 16;
  return load_bytes<float>(&bits);
}

// kPanel values as two vectors. A bf16 pair shares a 32-bit lane: a holds the even places, b the odd ones, two
// operations for 2 x kLanes values. `store_pair` undoes the order, so whoever loads by pairs and stores by pairs sees none of it.
inline void load_pair(const float* from, Vec& a, Vec& b) {
  a = load(from);
  b = load(from + kLanes);
}
inline void load_pair(const bf16* from, Vec& a, Vec& b) {
  VecWord words = load_bytes<VecWord>(from);
  a = (Vec)(words << 16);
  b = (Vec)(words & 0xffff0000u);
}
inline void store_pair(float* to, Vec a, Vec b) {
  store(to, a);
  store(to + kLanes, b);
}
inline void store_pair(bf16* to, Vec a, Vec b) { store_bytes(to, bf16_bits(a) | (bf16_bits(b) << 16)); }

inline float sum_lanes(Vec x) {
  float lanes[kLanes];
  store(lanes, x);
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  return lanes[0];
}

inline float max_lanes(Vec x) {
  float lanes[kLanes];
  store(lanes, x);
  float most = lanes[0];
  for (int i = 1; i < kLanes; ++i) most = lanes[i] > most ? lanes[i] : most;
  return most;
}

inline Vec exp(Vec x) { return exponential(x); }

// One stage of the transpose: swaps the off-diagonal blocks of Width x Width words.
template <int Width>
inline __attribute__((always_inline)) void transpose_from(VecWord (&rows)[kLanes]) {
  constexpr auto mask = [](bool high) {
    VecWord lanes{};
    for (uint32_t lane = 0; lane < kLanes; ++lane) {
      const bool second = lane & Width;
      lanes[lane] = high ? (second ? kLanes + lane : lane + Width) : (second ? kLanes + lane - Width : lane);
    }
    return lanes;
  };
  const VecWord low = mask(false), high = mask(true);
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) {
    if (i & Width) continue;
    const VecWord a = rows[i], b = rows[i + Width];
    rows[i] = __builtin_shuffle(a, b, low);
    rows[i + Width] = __builtin_shuffle(a, b, high);
  }
  if constexpr (2 * Width < kLanes) transpose_from<2 * Width>(rows);
}

// Transposes kLanes x kLanes words in place.
inline __attribute__((always_inline)) void transpose(VecWord (&rows)[kLanes]) { transpose_from<1>(rows); }

}  // namespace rs
