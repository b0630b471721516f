// What sampling over a whole vocabulary needs: log-probabilities with entropies in one go, and counter-based Gumbel noise.
//
// Legend: R rows, V vocabulary.

#include <algorithm>
#include <vector>

#include "api.h"
#include "draws.h"

namespace rs {
namespace {

constexpr int64_t kPiece = 4096;  // vocabulary entries of one work item; fixed, so that sums do not depend on the thread count

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

// noise[row][i]: of token_ids[i], or of token i without ids.
void gumbel_noise(const int64_t* seeds, const int64_t* positions, int64_t stream, const int64_t* token_ids, float* noise, int64_t num_rows,
                  int64_t num_tokens, int threads) {
  const int64_t pieces = (num_tokens + kPiece - 1) / kPiece;
#pragma omp parallel for num_threads(threads_for(num_rows * num_tokens * 4, threads)) schedule(static)
  for (int64_t i = 0; i < num_rows * pieces; ++i) {
    const int64_t row = i / pieces, begin = i % pieces * kPiece, count = std::min(num_tokens - begin, kPiece);
    uint32_t words[kPiece];
    token_words({seeds[row], stream, positions[row]}, token_ids, begin, count, words);
    for (int64_t v = 0; v < count; v += kLanes)
      store_first(noise + row * num_tokens + begin + v, gumbel_of<Vec>(load_bytes<VecWord>(words + v)), count - v);
  }
}

// Weights given by their logarithms.
struct Exponentials {
  const float* log_probs;
  Vec operator()(int64_t v, int64_t num) const {
    const Vec weights = exp(load_first(log_probs + v, num));
    return num < kLanes ? (iota() < (int32_t)num ? weights : Vec{}) : weights;
  }
};

}  // namespace
}  // namespace rs

// uniforms[row][i] = (word i of the row's stream) / 2^64, rounded down to 53 bits: rollout_spec/noise.py's uniforms.
RS_EXPORT void rs_uniforms(const int64_t* seeds, const int64_t* positions, int64_t stream, double* uniforms, int64_t num_rows, int64_t num) {
  uint64_t words[4 * rs::kBlocks];
  for (int64_t row = 0; row < num_rows; ++row)
    for (int64_t begin = 0; begin < num; begin += 4 * rs::kBlocks) {
      rs::philox({seeds[row], stream, positions[row]}, rs::blocks_from(begin / 4), words);
      for (int64_t i = begin; i < std::min(num, begin + 4 * rs::kBlocks); ++i) uniforms[row * num + i] = rs::uniform_of(words[i - begin]);
    }
}

RS_EXPORT void rs_gumbel_argmax(const float* log_probs, const int64_t* seeds, const int64_t* positions, int64_t stream, int64_t* token_ids,
                                int64_t num_rows, int64_t vocab, int threads) {
#pragma omp parallel for num_threads(rs::threads_for(num_rows * vocab * 4, threads)) schedule(dynamic)
  for (int64_t row = 0; row < num_rows; ++row)
    token_ids[row] = rs::gumbel_race(log_probs + row * vocab, 1.0f, {seeds[row], stream, positions[row]}, nullptr, 0, vocab).index;
}

RS_EXPORT void rs_inverse_cdf(const float* log_probs, const double* uniforms, int64_t* token_ids, int64_t num_rows, int64_t vocab, int threads) {
#pragma omp parallel num_threads(rs::threads_for(num_rows * vocab, threads))
  {
    std::vector<double> edges;
#pragma omp for schedule(dynamic)
    for (int64_t row = 0; row < num_rows; ++row)
      token_ids[row] = rs::inverse_cdf(rs::Exponentials{log_probs + row * vocab}, uniforms[row], vocab, edges);
  }
}

RS_EXPORT void rs_log_softmax_stats(int is_bf16, const void* logits, const float* inv_temperatures, float* log_probs, float* entropies,
                                    int64_t num_rows, int64_t vocab, int threads) {
  rs::with_type(is_bf16, [&]<class T>() {
    rs::log_softmax_stats((const T*)logits, inv_temperatures, log_probs, entropies, num_rows, vocab, threads);
  });
}

RS_EXPORT void rs_gumbel_noise(const int64_t* seeds, const int64_t* positions, int64_t stream, const int64_t* token_ids, float* noise,
                               int64_t num_rows, int64_t num_tokens, int threads) {
  rs::gumbel_noise(seeds, positions, stream, token_ids, noise, num_rows, num_tokens, threads);
}
