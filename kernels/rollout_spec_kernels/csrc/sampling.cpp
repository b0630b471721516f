// What sampling over a whole vocabulary needs: log-probabilities with entropies in one go, and counter-based Gumbel noise.
//
// Legend: R rows, V vocabulary.

#include <algorithm>
#include <initializer_list>
#include <limits>
#include <vector>

#include "api.h"

namespace rs {
namespace {

constexpr int64_t kPiece = 4096;  // vocabulary entries of one work item; fixed, so that sums do not depend on the thread count
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Of x over one piece: m = max x, sum e^(x - m), and sum e^(x - m) (x - m). NaN anywhere makes the sums NaN.
struct PieceSums {
  float most = -kInfinity;
  double weight = 0, moment = 0;
};

template <class T>
PieceSums sum_piece(const T* logits, int64_t size, float inv_temperature) {
  Vec most = splat(-kInfinity);
  for (int64_t i = 0; i < size; i += kLanes) {
    const int64_t here = std::min<int64_t>(kLanes, size - i);
    Vec x = load_first(logits + i, here) * splat(inv_temperature);
    if (here < kLanes) x = iota() < (int32_t)here ? x : splat(-kInfinity);
    most = larger(most, x);
  }
  PieceSums sums;
  sums.most = max_lanes(most);
  const Vec base = splat(sums.most == -kInfinity ? 0.0f : sums.most);  // -inf - -inf would be NaN
  Vec weight = {}, moment = {};
  for (int64_t i = 0; i < size; i += kLanes) {
    const int64_t here = std::min<int64_t>(kLanes, size - i);
    const Vec below = load_first(logits + i, here) * splat(inv_temperature) - base;
    Vec e = exp(below);
    if (here < kLanes) e = iota() < (int32_t)here ? e : Vec{};
    weight += e;
    moment += e > 0 ? e * below : Vec{};  // 0 * -inf is 0 here
  }
  sums.weight = sum_lanes(weight);
  sums.moment = sum_lanes(moment);
  return sums;
}

template <class T>
void log_softmax_stats(const T* logits, const float* inv_temperatures, float* log_probs, float* entropies, int64_t num_rows, int64_t vocab,
                       int threads) {
  const int64_t pieces = (vocab + kPiece - 1) / kPiece;
  std::vector<PieceSums> sums(num_rows * pieces);
  std::vector<float> shift(num_rows), log_weight(num_rows);
#pragma omp parallel num_threads(threads_for(num_rows * vocab, threads))
  {
#pragma omp for schedule(static)
    for (int64_t i = 0; i < num_rows * pieces; ++i) {
      const int64_t row = i / pieces, begin = i % pieces * kPiece;
      sums[i] = sum_piece(logits + row * vocab + begin, std::min(kPiece, vocab - begin), inv_temperatures[row]);
    }
#pragma omp for schedule(static)
    for (int64_t row = 0; row < num_rows; ++row) {
      const PieceSums* piece = sums.data() + row * pieces;
      float most = -kInfinity;
      for (int64_t p = 0; p < pieces; ++p) most = std::max(most, piece[p].most);
      double weight = 0, moment = 0;
      for (int64_t p = 0; p < pieces; ++p) {
        if (piece[p].weight == 0) continue;  // nothing but -inf
        const double below = (double)piece[p].most - most, scale = std::exp(below);
        weight += scale * piece[p].weight;
        moment += scale * (piece[p].moment + below * piece[p].weight);
      }
      shift[row] = most;
      log_weight[row] = (float)std::log(weight);
      entropies[row] = (float)(std::log(weight) - moment / weight);
    }
#pragma omp for schedule(static)
    for (int64_t i = 0; i < num_rows * pieces; ++i) {
      const int64_t row = i / pieces, begin = i % pieces * kPiece, end = std::min(vocab, begin + kPiece);
      for (int64_t v = begin; v < end; v += kLanes) {
        const Vec x = load_first(logits + row * vocab + v, end - v) * splat(inv_temperatures[row]);
        store_first(log_probs + row * vocab + v, x - splat(shift[row]) - splat(log_weight[row]), end - v);
      }
    }
  }
}

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

// Philox4x64-10 (Salmon et al. 2011): blocks [block, block + kBlocks) of (seed, stream) at a position, as rollout_spec/noise.py has them;
// word i of block b goes to words[4 b + i].
inline void philox(uint64_t seed, uint64_t stream, uint64_t position, uint64_t block, uint64_t* words) {
  Blocks c0, c1 = Blocks{} + position, c2 = {}, c3 = {};
  for (int b = 0; b < kBlocks; ++b) c0[b] = block + b;
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

// ln x for normal x > 0 to about 1 ulp (Cephes logf).
inline Vec log(Vec x) {
  const VecInt bits = (VecInt)x;
  VecInt power = (bits >> 23) - 126;
  Vec part = (Vec)((bits & 0x007fffff) | 0x3f000000);  // in [1/2, 1)
  const VecInt small = part < 0.707106781186547524f;
  power += small;
  part = part + ((Vec)((VecInt)part & small)) - splat(1.0f);
  const Vec square = part * part;
  Vec poly = splat(7.0376836292e-2f);
  for (float coefficient : {-1.1514610310e-1f, 1.1676998740e-1f, -1.2420140846e-1f, 1.4249322787e-1f, -1.6668057665e-1f, 2.0000714765e-1f,
                            -2.4999993993e-1f, 3.3333331174e-1f})
    poly = fma(poly, part, splat(coefficient));
  const Vec exponent = __builtin_convertvector(power, Vec);
  Vec rest = fma(exponent, splat(-2.12194440e-4f), poly * part * square);
  rest = fma(square, splat(-0.5f), rest);
  return fma(exponent, splat(0.693359375f), part + rest);
}

// -log(-log1p(-u)) with u = min((word + 1/2) / 2^32, 1 - 2^-24): always finite.
inline Vec gumbel(VecWord words) {
  const Vec scaled = (__builtin_convertvector(words, Vec) + splat(0.5f)) * splat(0x1p-32f);
  const Vec u = scaled < 1.0f ? scaled : splat(1.0f - 0x1p-24f);
  // log1p(-u) = log(w) + (what rounding w = 1 - u lost) / w.
  const Vec w = splat(1.0f) - u, lost = (splat(1.0f) - w) - u;
  const Vec e = -(log(w) + lost / w);
  return -log(e);
}

void gumbel_noise(const int64_t* seeds, const int64_t* positions, int64_t stream, float* noise, int64_t num_rows, int64_t vocab, int threads) {
  const int64_t pieces = (vocab + kPiece - 1) / kPiece;
#pragma omp parallel for num_threads(threads_for(num_rows * vocab * 4, threads)) schedule(static)
  for (int64_t i = 0; i < num_rows * pieces; ++i) {
    const int64_t row = i / pieces, begin = i % pieces * kPiece, end = std::min(vocab, begin + kPiece);
    uint64_t words[kPiece / 2];
    for (int64_t v = begin; v < end; v += 8 * kBlocks) philox(seeds[row], stream, positions[row], v / 8, words + (v - begin) / 2);
    for (int64_t v = begin; v < end; v += kLanes)
      store_first(noise + row * vocab + v, gumbel(load_bytes<VecWord>((const uint32_t*)words + v - begin)), end - v);
  }
}

// argmax_v (log p(v) + G(v)) of one row, lowest token on ties, with the noise of gumbel_noise and without storing it.
int64_t gumbel_argmax(const float* log_probs, uint64_t seed, uint64_t stream, uint64_t position, int64_t vocab) {
  Vec best = splat(-kInfinity);
  VecInt where = {};
  for (int64_t begin = 0; begin < vocab; begin += 8 * kBlocks) {
    uint64_t words[4 * kBlocks];
    philox(seed, stream, position, begin / 8, words);
    for (int64_t v = begin; v < std::min(vocab, begin + 8 * kBlocks); v += kLanes) {
      const int64_t here = std::min<int64_t>(kLanes, vocab - v);
      Vec score = load_first(log_probs + v, here) + gumbel(load_bytes<VecWord>((const uint32_t*)words + v - begin));
      if (here < kLanes) score = iota() < (int32_t)here ? score : splat(-kInfinity);
      const VecInt wins = score > best;
      best = wins ? score : best;
      where = wins ? iota() + (int32_t)v : where;
    }
  }
  int64_t winner = where[0];
  float most = best[0];
  for (int lane = 1; lane < kLanes; ++lane)
    if (best[lane] > most || (best[lane] == most && where[lane] < winner)) most = best[lane], winner = where[lane];
  return winner;
}

constexpr int64_t kBlockSize = 256;  // tokens of one cumulative sum

// The first token whose cumulative probability exceeds uniform * total, in token order; -1 if the row has no mass or a NaN. The level
// stays below the total and a token of zero probability is never returned (verify.categorical.inverse_cdf says why that matters).
int64_t inverse_cdf(const float* log_probs, double uniform, int64_t vocab, std::vector<double>& edges) {
  edges.clear();
  double total = 0;
  for (int64_t begin = 0; begin < vocab; begin += kBlockSize) {
    Vec weight = {};
    for (int64_t v = begin; v < std::min(vocab, begin + kBlockSize); v += kLanes) {
      const int64_t here = std::min<int64_t>(kLanes, vocab - v);
      Vec e = exp(load_first(log_probs + v, here));
      if (here < kLanes) e = iota() < (int32_t)here ? e : Vec{};
      weight += e;
    }
    total += sum_lanes(weight);
    edges.push_back(total);
  }
  if (!(total > 0 && total < std::numeric_limits<double>::infinity())) return -1;
  const double level = std::min(uniform * total, std::nextafter(total, 0.0));
  const int64_t block = std::upper_bound(edges.begin(), edges.end(), level) - edges.begin();
  double sum = block ? edges[block - 1] : 0;
  int64_t last = -1;  // absorbs what the block's own sum rounds differently
  for (int64_t v = block * kBlockSize; v < std::min(vocab, (block + 1) * kBlockSize); ++v) {
    const float weight = exp(splat(log_probs[v]))[0];
    if (weight > 0) last = v;
    sum += weight;
    if (sum > level) break;
  }
  return last;
}

}  // namespace
}  // namespace rs

// uniforms[row][i] = (word i of the row's stream) / 2^64, rounded down to 53 bits: rollout_spec/noise.py's uniforms.
RS_EXPORT void rs_uniforms(const int64_t* seeds, const int64_t* positions, int64_t stream, double* uniforms, int64_t num_rows, int64_t num) {
  uint64_t words[4 * rs::kBlocks];
  for (int64_t row = 0; row < num_rows; ++row)
    for (int64_t begin = 0; begin < num; begin += 4 * rs::kBlocks) {
      rs::philox(seeds[row], stream, positions[row], begin / 4, words);
      for (int64_t i = begin; i < std::min(num, begin + 4 * rs::kBlocks); ++i) uniforms[row * num + i] = (words[i - begin] >> 11) * 0x1p-53;
    }
}

RS_EXPORT void rs_gumbel_argmax(const float* log_probs, const int64_t* seeds, const int64_t* positions, int64_t stream, int64_t* token_ids,
                                int64_t num_rows, int64_t vocab, int threads) {
#pragma omp parallel for num_threads(rs::threads_for(num_rows * vocab * 4, threads)) schedule(dynamic)
  for (int64_t row = 0; row < num_rows; ++row)
    token_ids[row] = rs::gumbel_argmax(log_probs + row * vocab, seeds[row], stream, positions[row], vocab);
}

RS_EXPORT void rs_inverse_cdf(const float* log_probs, const double* uniforms, int64_t* token_ids, int64_t num_rows, int64_t vocab, int threads) {
#pragma omp parallel num_threads(rs::threads_for(num_rows * vocab, threads))
  {
    std::vector<double> edges;
#pragma omp for schedule(dynamic)
    for (int64_t row = 0; row < num_rows; ++row) token_ids[row] = rs::inverse_cdf(log_probs + row * vocab, uniforms[row], vocab, edges);
  }
}

RS_EXPORT void rs_log_softmax_stats(int is_bf16, const void* logits, const float* inv_temperatures, float* log_probs, float* entropies,
                                    int64_t num_rows, int64_t vocab, int threads) {
  rs::with_type(is_bf16, [&]<class T>() {
    rs::log_softmax_stats((const T*)logits, inv_temperatures, log_probs, entropies, num_rows, vocab, threads);
  });
}

RS_EXPORT void rs_gumbel_noise(const int64_t* seeds, const int64_t* positions, int64_t stream, float* noise, int64_t num_rows, int64_t vocab,
                               int threads) {
  rs::gumbel_noise(seeds, positions, stream, noise, num_rows, vocab, threads);
}
