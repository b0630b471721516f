// Elementary functions and counter-based noise for one number or a vector of them, on the CPU and in CUDA.
//
// Each is one template over its type: `float` is what a CUDA thread computes, `Vec` (simd.h) what the CPU does, with the same
// operations in the same order, so the two have the same bits wherever the machine has a fused multiply-add. Nothing here may be compiled
// with -ffast-math or with contraction (nvcc: -fmad=false).
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define RS_HD __host__ __device__
#else
#define RS_HD
#endif

namespace rs {

template <class To, class From>
RS_HD inline To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From), "bits are reinterpreted, not converted");
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}

// What a type of numbers has beside its operators. simd.h adds Vec.
template <class V>
struct Lanes;

template <>
struct Lanes<float> {
  typedef int32_t Int;
  typedef uint32_t Word;
  static RS_HD float splat(float x) { return x; }
  static RS_HD float of(Int x) { return (float)x; }
  static RS_HD float of(Word x) { return (float)x; }
  // a * b + c with one rounding where the machine has it: spelled out, so that every instance of a template rounds alike.
  static RS_HD float fma(float a, float b, float c) {
#if defined(__CUDA_ARCH__) || defined(__FMA__)
    return ::fmaf(a, b, c);
#else
    return a * b + c;
#endif
  }
};

template <class V>
RS_HD inline V smaller(V a, V b) {
  return b < a ? b : a;
}

// e^x to about 1 ulp (Cephes expf); exp(-inf) = 0 exactly, exp(NaN) = NaN.
template <class V>
RS_HD inline V exponential(V x) {
  typedef typename Lanes<V>::Int Int;
  const auto splat = [](float c) { return Lanes<V>::splat(c); };
  V bounded = x < -104.0f ? splat(-104.0f) : x;
  bounded = bounded > 89.0f ? splat(89.0f) : bounded;
  const V shifted = Lanes<V>::fma(bounded, splat(1.44269504088896341f), splat(12582912.0f));
  const V power = shifted - splat(12582912.0f);
  V rest = Lanes<V>::fma(power, splat(-0.693359375f), bounded);
  rest = Lanes<V>::fma(power, splat(2.12194440e-4f), rest);
  V poly = splat(1.9875691500e-4f);
  poly = Lanes<V>::fma(poly, rest, splat(1.3981999507e-3f));
  poly = Lanes<V>::fma(poly, rest, splat(8.3334519073e-3f));
  poly = Lanes<V>::fma(poly, rest, splat(4.1665795894e-2f));
  poly = Lanes<V>::fma(poly, rest, splat(1.6666665459e-1f));
  poly = Lanes<V>::fma(poly, rest, splat(5.0000001201e-1f));
  V value = Lanes<V>::fma(poly, rest * rest, rest + splat(1.0f));
  // 2^power in two steps, so that neither leaves the range of normal numbers.
  const Int whole = bits_as<Int>(shifted) - 0x4b400000;
  const Int half = whole >> 1;
  value = value * bits_as<V>((half + 127) << 23) * bits_as<V>((whole - half + 127) << 23);
  value = x < -104.0f ? splat(0.0f) : value;
  return x == x ? value : x;
}

// ln x for normal x > 0 to about 1 ulp (Cephes logf).
template <class V>
RS_HD inline V logarithm(V x) {
  typedef typename Lanes<V>::Int Int;
  const auto splat = [](float c) { return Lanes<V>::splat(c); };
  const Int bits = bits_as<Int>(x);
  Int power = (bits >> 23) - 126;
  V part = bits_as<V>((bits & 0x007fffff) | 0x3f000000);  // in [1/2, 1)
  const auto is_small = part < 0.707106781186547524f;
  power = is_small ? power - 1 : power;
  part = part + (is_small ? part : splat(0.0f)) - splat(1.0f);
  const V square = part * part;
  V poly = splat(7.0376836292e-2f);
  poly = Lanes<V>::fma(poly, part, splat(-1.1514610310e-1f));
  poly = Lanes<V>::fma(poly, part, splat(1.1676998740e-1f));
  poly = Lanes<V>::fma(poly, part, splat(-1.2420140846e-1f));
  poly = Lanes<V>::fma(poly, part, splat(1.4249322787e-1f));
  poly = Lanes<V>::fma(poly, part, splat(-1.6668057665e-1f));
  poly = Lanes<V>::fma(poly, part, splat(2.0000714765e-1f));
  poly = Lanes<V>::fma(poly, part, splat(-2.4999993993e-1f));
  poly = Lanes<V>::fma(poly, part, splat(3.3333331174e-1f));
  const V exponent = Lanes<V>::of(power);
  V rest = Lanes<V>::fma(exponent, splat(-2.12194440e-4f), poly * part * square);
  rest = Lanes<V>::fma(square, splat(-0.5f), rest);
  return Lanes<V>::fma(exponent, splat(0.693359375f), part + rest);
}

// -log(-log1p(-u)) with u = min((word + 1/2) / 2^32, 1 - 2^-24): always finite.
template <class V>
RS_HD inline V gumbel_of(typename Lanes<V>::Word words) {
  const auto splat = [](float c) { return Lanes<V>::splat(c); };
  const V scaled = (Lanes<V>::of(words) + splat(0.5f)) * splat(0x1p-32f);
  const V u = scaled < 1.0f ? scaled : splat(1.0f - 0x1p-24f);
  // log1p(-u) = log(w) + (what rounding w = 1 - u lost) / w.
  const V w = splat(1.0f) - u, lost = (splat(1.0f) - w) - u;
  const V e = -(logarithm(w) + lost / w);
  return -logarithm(e);
}

// Where a row's noise comes from: rollout_spec/noise.py has the paragraph on it.
struct NoiseKey {
  int64_t seed, stream, position;
};

enum Stream : int64_t { kTarget = 0, kAccept = 1, kRecover = 2, kDraft = 3 };  // rollout_spec/noise.py

RS_HD inline uint64_t multiply_high(uint64_t a, uint64_t b) {
#if defined(__CUDA_ARCH__)
  return __umul64hi(a, b);
#else
  return (uint64_t)(((unsigned __int128)a * b) >> 64);
#endif
}

// Philox4x64-10 (Salmon et al. 2011): one block of a key.
RS_HD inline void philox_block(const NoiseKey& key, uint64_t block, uint64_t (&words)[4]) {
  constexpr uint64_t kFirst = 0xD2E7470EE14C6C93u, kSecond = 0xCA5A826395121157u;
  uint64_t c0 = block, c1 = (uint64_t)key.position, c2 = 0, c3 = 0, seed = (uint64_t)key.seed, stream = (uint64_t)key.stream;
  for (int round = 0; round < 10; ++round) {
    const uint64_t high0 = multiply_high(kFirst, c0), low0 = kFirst * c0, high2 = multiply_high(kSecond, c2), low2 = kSecond * c2;
    c0 = high2 ^ c1 ^ seed;
    c1 = low2;
    c2 = high0 ^ c3 ^ stream;
    c3 = low0;
    seed += 0x9E3779B97F4A7C15u;
    stream += 0xBB67AE8584CAA73Bu;
  }
  words[0] = c0;
  words[1] = c1;
  words[2] = c2;
  words[3] = c3;
}

// A word of a key's stream as a uniform in [0, 1), rounded down to 53 bits.
RS_HD inline double uniform_of(uint64_t word) { return (double)(word >> 11) * 0x1p-53; }

// Word `index` of the key's stream as a uniform.
RS_HD inline double uniform_at(const NoiseKey& key, int64_t index) {
  uint64_t words[4];
  philox_block(key, (uint64_t)index / 4, words);
  return uniform_of(words[index % 4]);
}

// What races are decided by: the larger score, the lowest index on ties.
struct Winner {
  float score;
  int64_t index;
  RS_HD bool loses_to(const Winner& other) const { return other.score > score || (other.score == score && other.index < index); }
};

}  // namespace rs
