// Temperature, min-p, top-k, top-p and log-softmax of a row in one go: rollout_spec/truncation.py's support, ties included.
//
// A row is divided by its temperature where its log-probabilities will stand, with the maxima of its blocks beside it; after that only blocks
// that reach a threshold are looked at.
//
// Legend: R rows, V vocabulary.

#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

#include "api.h"
#include "draws.h"

namespace rs {
namespace {

constexpr int64_t kBlock = 64;  // entries that share a maximum

constexpr int64_t kBuckets = 1024;  // of values, in which a nucleus' edge is looked for: sorting all candidates would be most of the work

struct Candidate {
  float value, weight;  // e^(value - most), once weighed
  int64_t id;
};

class Row {
 public:
  Row(float* x, int64_t vocab) : x_(x), vocab_(vocab) {}

  // x = logits / temperature. False if the row defines no distribution: a NaN, +inf, or nothing above -inf.
  template <class T>
  bool divide(const T* logits, float temperature) {
    maxima_.clear();
    VecInt poison = {};
    for (int64_t begin = 0; begin < vocab_; begin += kBlock) {
      Vec most = splat(-kInfinity);
      for (int64_t v = begin; v < std::min(begin + kBlock, vocab_); v += kLanes) {
        const int64_t here = vocab_ - v;
        Vec x = load_first(logits + v, here) / splat(temperature);
        if (here < kLanes) x = iota() < (int32_t)here ? x : splat(-kInfinity);
        poison |= x != x;
        most = larger(most, x);
        store_first(x_ + v, x, here);
      }
      maxima_.push_back(max_lanes(most));
    }
    most_ = *std::max_element(maxima_.begin(), maxima_.end());
    for (int lane = 0; lane < kLanes; ++lane)
      if (poison[lane]) return false;
    return std::isfinite(most_);
  }

  void truncate(int64_t top_k, double top_p, double min_p) {
    double floor = min_p > 0 ? most_ + std::log(min_p) : -(double)kInfinity;
    if (top_k > 0 && top_k < vocab_) floor = std::max(floor, (double)kth_largest(top_k));
    if (top_p < 1 && floor == -(double)kInfinity)
      keep_nucleus_of_all(top_p);
    else {
      gather((float)floor);
      double total = 0;
      for (Candidate& one : kept_) total += one.weight = exponential(one.value - most_);
      if (top_p < 1) keep_nucleus(top_p, total, (int64_t)kept_.size());
    }
  }

  // Log-probabilities over what was kept, -inf elsewhere; returns the entropy.
  float finish() {
    double weight = 0, moment = 0;
    for (const Candidate& one : kept_) {
      weight += one.weight;
      moment += one.weight > 0 ? (double)one.weight * (one.value - most_) : 0;  // 0 * -inf is 0 here
    }
    const float log_weight = (float)std::log(weight);
    std::fill(x_, x_ + vocab_, -kInfinity);
    for (const Candidate& one : kept_) x_[one.id] = one.value - most_ - log_weight;
    return (float)(std::log(weight) - moment / weight);
  }

 private:
  // Each of the k blocks with the largest maxima holds a value that large: the k-th value lies among those that reach the k-th maximum.
  float kth_largest(int64_t k) {
    if (k > (int64_t)maxima_.size()) {
      sorted_.assign(x_, x_ + vocab_);
    } else {
      sorted_ = maxima_;
      std::nth_element(sorted_.begin(), sorted_.begin() + (k - 1), sorted_.end(), std::greater<>());
      gather(sorted_[k - 1]);
      sorted_.clear();
      for (const Candidate& one : kept_) sorted_.push_back(one.value);
    }
    std::nth_element(sorted_.begin(), sorted_.begin() + (k - 1), sorted_.end(), std::greater<>());
    return sorted_[k - 1];
  }

  // Keeps the tokens x >= floor, by id.
  void gather(float floor) {
    kept_.clear();
    for (int64_t block = 0; block < (int64_t)maxima_.size(); ++block) {
      if (!(maxima_[block] >= floor)) continue;
      for (int64_t v = block * kBlock; v < std::min((block + 1) * kBlock, vocab_); ++v)
        if (x_[v] >= floor) kept_.push_back({x_[v], 0, v});
    }
  }

  // Tokens with less than half of (1 - p) / V of the mass hold less than 1 - p together: the nucleus lies above them.
  void keep_nucleus_of_all(double top_p) {
    double total = 0;
    weights_.resize(vocab_ + kLanes);
    for (int64_t v = 0; v < vocab_; v += kLanes) {
      Vec e = exp(load_first(x_ + v, vocab_ - v) - splat(most_));
      if (vocab_ - v < kLanes) e = iota() < (int32_t)(vocab_ - v) ? e : Vec{};
      store(weights_.data() + v, e);
      total += sum_lanes(e);
    }
    gather((float)(most_ + std::log(0.5 * (1 - top_p) / vocab_ * total)));
    for (Candidate& one : kept_) one.weight = weights_[one.id];
    keep_nucleus(top_p, total, vocab_);
  }

  // Of what is kept, the smallest set of largest values with mass >= top_p of total, lowest ids first among equal values.
  void keep_nucleus(double top_p, double total, int64_t num_before) {
    const double bound = 0.5 * (1 - top_p) / num_before * total, wanted = top_p * total;
    float least = most_;
    for (const Candidate& one : kept_)
      if (one.weight >= bound) least = std::min(least, one.value);
    // Buckets descend with the value, and equal values share one.
    const float scale = least < most_ ? (float)kBuckets / (most_ - least) : 0;
    const auto bucket_of = [&](float value) { return std::min((int64_t)((most_ - value) * scale), kBuckets - 1); };
    double mass[kBuckets] = {};
    for (const Candidate& one : kept_)
      if (one.weight >= bound) mass[bucket_of(one.value)] += one.weight;
    int64_t edge = 0, last_filled = 0;
    double reached = 0, before = 0;
    for (; edge < kBuckets && reached < wanted; ++edge)
      if (mass[edge] > 0) before = reached, reached += mass[edge], last_filled = edge;
    inside_.clear();
    for (const Candidate& one : kept_)
      if (one.weight >= bound && bucket_of(one.value) == last_filled) inside_.push_back(one);
    std::sort(inside_.begin(), inside_.end(), [](const Candidate& a, const Candidate& b) { return a.value > b.value; });
    int64_t num = 0, ties = 0;
    float last = most_;
    for (reached = before; num < (int64_t)inside_.size() && (num == 0 || reached < wanted); ++num) {
      ties = inside_[num].value == last && num ? ties + 1 : 1;
      last = inside_[num].value;
      reached += inside_[num].weight;
    }
    std::erase_if(kept_, [&](const Candidate& one) { return !(one.value > last || (one.value == last && ties-- > 0)); });
  }

  float* const x_;
  const int64_t vocab_;
  float most_ = 0;
  std::vector<float> maxima_, sorted_, weights_;
  std::vector<Candidate> kept_, inside_;
};

template <class T>
void truncated_log_softmax(const T* logits, const float* temperatures, const int64_t* top_k, const double* top_p, const double* min_p,
                           float* log_probs, float* entropies, int64_t num_rows, int64_t vocab, int threads) {
#pragma omp parallel for num_threads(threads_for(num_rows * vocab, threads)) schedule(dynamic)
  for (int64_t r = 0; r < num_rows; ++r) {
    Row row(log_probs + r * vocab, vocab);
    if (!row.divide(logits + r * vocab, temperatures[r])) {
      entropies[r] = NAN;
      std::fill(log_probs + r * vocab, log_probs + (r + 1) * vocab, NAN);
      continue;
    }
    row.truncate(top_k[r], top_p[r], min_p[r]);
    entropies[r] = row.finish();
  }
}

}  // namespace
}  // namespace rs

RS_EXPORT void rs_truncated_log_softmax(int is_bf16, const void* logits, const float* temperatures, const int64_t* top_k, const double* top_p,
                                        const double* min_p, float* log_probs, float* entropies, int64_t num_rows, int64_t vocab, int threads) {
  rs::with_type(is_bf16, [&]<class T>() {
    rs::truncated_log_softmax((const T*)logits, temperatures, top_k, top_p, min_p, log_probs, entropies, num_rows, vocab, threads);
  });
}
