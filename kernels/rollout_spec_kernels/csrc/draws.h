// Counter-based noise, and what draws one token from a row: races, inverse CDFs.
//
// Legend: V vocabulary.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <limits>
#include <vector>

#include "simd.h"

namespace rs {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

constexpr int kBlocks = 8;  // Philox blocks computed side by side: 64 tokens
typedef uint64_t Blocks __attribute__((vector_size(kBlocks * 8)));

// Products of the low halves of the lanes.
inline Blocks multiply_low(Blocks a, Blocks b) {
#if defined(__AVX512F__)
  return (Blocks)_mm512_mul_epu32((__m512i)a, (__m512i)b);
#else
  return (a & 0xffffffffu) * (b & 0xffffffffu);
#endif
}

struct Wide {
  Blocks high, low;
};

// 128-bit products by 32-bit halves.
inline Wide multiply(uint64_t factor, Blocks x) {
  const Blocks factor_low = Blocks{} + factor, factor_high = Blocks{} + (factor >> 32), x_high = x >> 32;
  const Blocks low = multiply_low(factor_low, x), high = multiply_low(factor_high, x_high);
  const Blocks cross = multiply_low(factor_high, x) + (low >> 32);  // cannot overflow: (2^32 - 1)^2 + 2^32 - 1 < 2^64
  const Blocks other = multiply_low(factor_low, x_high) + (cross & 0xffffffffu);
  return {high + (cross >> 32) + (other >> 32), (other << 32) | (low & 0xffffffffu)};
}

// Philox4x64-10 (Salmon et al. 2011): the given blocks of a key; word i of lane b goes to words[4 b + i].
inline void philox(const NoiseKey& key, Blocks c0, uint64_t* words) {
  uint64_t seed = (uint64_t)key.seed, stream = (uint64_t)key.stream;
  Blocks c1 = Blocks{} + (uint64_t)key.position, c2 = {}, c3 = {};
  for (int round = 0; round < 10; ++round) {
    const Wide first = multiply(0xD2E7470EE14C6C93u, c0), second = multiply(0xCA5A826395121157u, c2);
    c0 = second.high ^ c1 ^ seed;
    c2 = first.high ^ c3 ^ stream;
    c1 = second.low;
    c3 = first.low;
    seed += 0x9E3779B97F4A7C15u;
    stream += 0xBB67AE8584CAA73Bu;
  }
  for (int b = 0; b < kBlocks; ++b) {
    words[4 * b] = c0[b];
    words[4 * b + 1] = c1[b];
    words[4 * b + 2] = c2[b];
    words[4 * b + 3] = c3[b];
  }
}

// kBlocks blocks from `block` on.
inline Blocks blocks_from(uint64_t block) {
  Blocks blocks;
  for (int b = 0; b < kBlocks; ++b) blocks[b] = block + b;
  return blocks;
}

// words[i] = the word of noise of token_ids[first + i], or of token first + i (a multiple of 8) if there are no ids.
inline void token_words(const NoiseKey& key, const int64_t* token_ids, int64_t first, int64_t count, uint32_t* words) {
  uint64_t made[4 * kBlocks];
  uint32_t halves[8 * kBlocks];
  if (!token_ids) {
    for (int64_t i = 0; i < count; i += 8 * kBlocks) {
      philox(key, blocks_from((first + i) / 8), made);
      std::memcpy(words + i, made, std::min<int64_t>(8 * kBlocks, count - i) * sizeof(uint32_t));
    }
    return;
  }
  for (int64_t i = 0; i < count;) {
    // As many tokens as kBlocks blocks cover; where ids ascend, those of one block are neighbours.
    Blocks blocks = {};
    int64_t num_blocks = 0, end = i;
    for (; end < count; ++end) {
      const uint64_t token = (uint64_t)token_ids[first + end];
      if (num_blocks == 0 || blocks[num_blocks - 1] != token / 8) {
        if (num_blocks == kBlocks) break;
        blocks[num_blocks++] = token / 8;
      }
      words[end] = (uint32_t)(8 * (num_blocks - 1) + token % 8);
    }
    philox(key, blocks, made);
    std::memcpy(halves, made, sizeof(made));
    for (; i < end; ++i) words[i] = halves[words[i]];
  }
}

// argmax_i (scale logits[i] + G) over i in [first, first + count), first a multiple of 8, with the noise of rs_gumbel_noise, which is not
// stored: G is that of token_ids[i], or of token i without ids. NaN never wins.
inline Winner gumbel_race(const float* logits, float scale, const NoiseKey& key, const int64_t* token_ids, int64_t first, int64_t count) {
  constexpr int64_t kAtOnce = 512;
  uint32_t words[kAtOnce] = {};
  Vec best = splat(-kInfinity);
  VecInt where = VecInt{} + (int32_t)first;
  for (int64_t begin = first; begin < first + count; begin += kAtOnce) {
    const int64_t size = std::min(kAtOnce, first + count - begin);
    token_words(key, token_ids, begin, size, words);
    for (int64_t i = 0; i < size; i += kLanes) {
      const int64_t here = std::min<int64_t>(kLanes, size - i);
      Vec score = load_first(logits + begin + i, here) * splat(scale) + gumbel_of<Vec>(load_bytes<VecWord>(words + i));
      if (here < kLanes) score = iota() < (int32_t)here ? score : splat(-kInfinity);
      const VecInt wins = score > best;
      best = wins ? score : best;
      where = wins ? iota() + (int32_t)(begin + i) : where;
    }
  }
  Winner winner{best[0], where[0]};
  for (int lane = 1; lane < kLanes; ++lane)
    if (const Winner other{best[lane], where[lane]}; winner.loses_to(other)) winner = other;
  return winner;
}

typedef double Doubles __attribute__((vector_size(kLanes * 8)));

constexpr int64_t kBlockSize = 256;  // tokens of one cumulative sum

// The first token whose cumulative weight exceeds uniform * total, in token order; -1 if the row has no mass or a NaN. The level
// stays below the total and a token of zero weight is never returned (verify.categorical.inverse_cdf says why that matters).
// weight_at(v, n): the weights of tokens [v, v + n), at most kLanes, and zeros. Sums are in double: a token's chance is its weight.
template <class WeightAt>
int64_t inverse_cdf(WeightAt weight_at, double uniform, int64_t vocab, std::vector<double>& edges) {
  edges.clear();
  double total = 0;
  for (int64_t begin = 0; begin < vocab; begin += kBlockSize) {
    Doubles sums = {};
    for (int64_t v = begin; v < std::min(vocab, begin + kBlockSize); v += kLanes)
      sums += __builtin_convertvector(weight_at(v, std::min<int64_t>(kLanes, vocab - v)), Doubles);
    for (int lane = 0; lane < kLanes; ++lane) total += sums[lane];
    edges.push_back(total);
  }
  if (!(total > 0 && total < std::numeric_limits<double>::infinity())) return -1;
  const double level = std::min(uniform * total, std::nextafter(total, 0.0));
  const int64_t block = std::upper_bound(edges.begin(), edges.end(), level) - edges.begin();
  double sum = block ? edges[block - 1] : 0;
  int64_t last = -1;  // absorbs what the block's own sum rounds differently
  for (int64_t v = block * kBlockSize; v < std::min(vocab, (block + 1) * kBlockSize); ++v) {
    const float weight = weight_at(v, 1)[0];
    if (weight > 0) last = v;
    sum += weight;
    if (sum > level) break;
  }
  return last;
}

// Weights given as they are.
struct Weights {
  const float* probs;
  Vec operator()(int64_t v, int64_t num) const { return load_first(probs + v, num); }
};

// probs = softmax(scale logits), and a draw from these very numbers; -1 if they are no distribution.
inline int64_t draw_from_softmax(const float* logits, float scale, double uniform, int64_t vocab, float* probs, std::vector<double>& edges) {
  Vec most = splat(-kInfinity);
  for (int64_t v = 0; v < vocab; v += kLanes) {
    const int64_t here = std::min<int64_t>(kLanes, vocab - v);
    const Vec x = load_first(logits + v, here) * splat(scale);
    most = larger(most, here < kLanes ? (iota() < (int32_t)here ? x : splat(-kInfinity)) : x);
  }
  const Vec base = splat(max_lanes(most));
  Doubles sums = {};
  for (int64_t v = 0; v < vocab; v += kLanes) {
    const int64_t here = std::min<int64_t>(kLanes, vocab - v);
    store_first(probs + v, exp(load_first(logits + v, here) * splat(scale) - base), here);
    sums += __builtin_convertvector(load_first(probs + v, here), Doubles);
  }
  double total = 0;
  for (int lane = 0; lane < kLanes; ++lane) total += sums[lane];
  const Vec inverse = splat((float)(1 / total));
  for (int64_t v = 0; v < vocab; v += kLanes) store_first(probs + v, load_first(probs + v, vocab - v) * inverse, vocab - v);
  return inverse_cdf(Weights{probs}, uniform, vocab, edges);
}

inline bool all_finite(const float* logits, int64_t vocab) {
  Vec poison = {};  // 0 * NaN and 0 * inf are NaN
  for (int64_t v = 0; v < vocab; v += kLanes) poison += load_first(logits + v, vocab - v) * Vec{};
  return sum_lanes(poison) == 0;
}

// The first largest logit; -1 if one is not finite.
inline int64_t first_largest(const float* logits, int64_t vocab) {
  return all_finite(logits, vocab) ? std::max_element(logits, logits + vocab) - logits : -1;
}

// probs = 1 at the first largest logit.
inline int64_t point_mass(const float* logits, int64_t vocab, float* probs) {
  const int64_t best = first_largest(logits, vocab);
  std::fill(probs, probs + vocab, 0.0f);
  if (best >= 0) probs[best] = 1.0f;
  return best;
}

}  // namespace rs
