// Temperature, min-p, top-k, top-p and log-softmax of a row on a GPU, a block a row: rollout_spec/truncation.py's support, ties included.
//
// truncation.cpp lists candidates and sorts the few at the edge, which suits one thread; a block finds the same edge by bisection over the
// quotients, as integers that are ordered like them. Each pass sums the count, or e^x in double, of what lies above the middle, and the
// bounds move on to values that occur, so that a pass halves what is left. Sums have one order: a row's result is always the same.
//
// Legend: R rows, V vocabulary.

#include "block_team.h"

namespace rs {
namespace {

struct Brain16 {
  uint16_t bits;
};

__device__ inline float widened(float x) { return x; }
__device__ inline float widened(Brain16 x) { return bits_as<float>((uint32_t)x.bits << 16); }

// Ordered as x: its bits, with a negative number's magnitude turned over; -0 and 0 share one.
__device__ inline int64_t key_of(float x) {
  const int32_t bits = x == 0 ? 0 : bits_as<int32_t>(x);
  return bits ^ ((bits >> 31) & 0x7fffffff);
}

__device__ inline float value_of(int64_t key) {
  const int32_t bits = (int32_t)key;
  return bits_as<float>(bits ^ ((bits >> 31) & 0x7fffffff));
}

constexpr int64_t kAboveAll = (int64_t)1 << 31, kBelowAll = -kAboveAll;  // every float's key lies between

// Of a row's keys from a bound on: their weight and the least of them; and the largest key below.
struct Split {
  double weight = 0;
  int64_t least = kAboveAll, below = kBelowAll;
};

class BlockRow : public Block {
 public:
  // x [V] takes the quotients, then the log-probabilities. A thread's own entries are me, me + kThreads, ...
  __device__ BlockRow(BlockMemory& memory, float* x, int64_t vocab) : Block(memory), x_(x), vocab_(vocab) {}

  // x = logits / temperature. False if the row defines no distribution: a NaN, +inf, or nothing above -inf.
  template <class T>
  __device__ bool divide(const T* logits, float temperature) {
    float own = -INFINITY;
    bool is_number = true;
    for (int64_t v = me_; v < vocab_; v += kThreads) {
      const float x = widened(logits[v]) / temperature;
      is_number &= x == x;
      own = x > own ? x : own;
      x_[v] = x;
    }
    most_ = reduce(own, [](float a, float b) { return a > b ? a : b; });
    return all(is_number) && most_ > -INFINITY && most_ < INFINITY;
  }

  __device__ void truncate(int64_t top_k, double top_p, double min_p) {
    edge_ = min_p > 0 ? (float)(most_ + ::log(min_p)) : -INFINITY;
    last_ = vocab_;
    if (top_k > 0 && top_k < vocab_ && split<false>(key_of(edge_)).weight >= (double)top_k) move_edge<false>((double)top_k);
    if (top_p < 1) {
      const double wanted = top_p * split<true>(key_of(edge_)).weight, above = move_edge<true>(wanted);
      last_ = tied_token(wanted, above, weight(edge_));
    }
  }

  // Log-probabilities over what was kept, -inf elsewhere; returns the entropy.
  __device__ float finish() {
    struct Moments {
      double weight = 0, moment = 0;
    } own;
    for (int64_t v = me_; v < vocab_; v += kThreads) {
      if (!stays(v)) continue;
      const float e = weight(x_[v]);
      own.weight += e;
      own.moment += e > 0 ? (double)e * (x_[v] - most_) : 0;  // 0 * -inf is 0 here
    }
    const Moments total = reduce(own, [](const Moments& a, const Moments& b) { return Moments{a.weight + b.weight, a.moment + b.moment}; });
    const float log_weight = (float)::log(total.weight);
    for (int64_t v = me_; v < vocab_; v += kThreads) x_[v] = stays(v) ? x_[v] - most_ - log_weight : -INFINITY;
    return (float)(::log(total.weight) - total.moment / total.weight);
  }

  __device__ void refuse() {
    for (int64_t v = me_; v < vocab_; v += kThreads) x_[v] = NAN;
  }

 private:
  __device__ float weight(float x) const { return exponential(x - most_); }
  __device__ bool stays(int64_t v) const { return x_[v] > edge_ || (x_[v] == edge_ && v <= last_); }

  template <bool kByMass>
  __device__ Split split(int64_t bound) {
    Split own;
    for (int64_t v = me_; v < vocab_; v += kThreads) {
      const int64_t key = key_of(x_[v]);
      if (key >= bound) {
        own.weight += kByMass ? (double)weight(x_[v]) : 1.0;
        own.least = key < own.least ? key : own.least;
      } else {
        own.below = key > own.below ? key : own.below;
      }
    }
    return reduce(own, [](const Split& a, const Split& b) {
      return Split{a.weight + b.weight, a.least < b.least ? a.least : b.least, a.below > b.below ? a.below : b.below};
    });
  }

  // Moves the edge up to the largest value such that what lies from it on weighs at least `wanted`; returns what lies above it.
  template <bool kByMass>
  __device__ double move_edge(double wanted) {
    int64_t low = key_of(edge_), high = key_of(most_) + 1;  // enough from low on, too little from high on
    double above = 0;
    while (high - low > 1) {
      const int64_t middle = low + (high - low) / 2;
      const Split from = split<kByMass>(middle);
      if (from.weight >= wanted) {
        low = from.least;
      } else {
        high = from.below + 1;
        above = from.weight;
      }
    }
    edge_ = value_of(low);
    return above;
  }

  // The first token at the edge, in order of id, with which the mass reaches `wanted`.
  __device__ int64_t tied_token(double wanted, double above, double own_weight) {
    double number = ::ceil((wanted - above) / own_weight);  // the quotient may be rounded to either side
    number = number < 1 ? 1 : number;
    if (number > 1 && above + (number - 1) * own_weight >= wanted) number -= 1;
    if (above + number * own_weight < wanted) number += 1;
    const int64_t size = (vocab_ + kThreads - 1) / kThreads, from = me_ * size;
    double tied = 0;
    for (int64_t v = from; v < from + size && v < vocab_; ++v) tied += x_[v] == edge_;
    const double until = scan(tied);
    int64_t token = vocab_;
    if (until - tied < number && number <= until) {  // it is among mine
      double seen = until - tied;
      for (token = from; x_[token] != edge_ || ++seen < number;) ++token;
    }
    return least(token);
  }

  float* const x_;
  const int64_t vocab_;
  float most_ = 0, edge_ = 0;
  int64_t last_ = 0;
};

template <class T>
__global__ void __launch_bounds__(kThreads, 1)
    truncated_log_softmax(const T* logits, const float* temperatures, const int64_t* top_k, const double* top_p, const double* min_p,
                          float* log_probs, float* entropies, int64_t vocab) {
  __shared__ BlockMemory memory;
  const int64_t r = blockIdx.x;
  BlockRow row(memory, log_probs + r * vocab, vocab);
  float entropy = NAN;
  if (row.divide(logits + r * vocab, temperatures[r])) {
    row.truncate(top_k[r], top_p[r], min_p[r]);
    entropy = row.finish();
  } else {
    row.refuse();
  }
  if (row.leads()) entropies[r] = entropy;
}

template <class T>
void launch(const void* logits, const float* temperatures, const int64_t* top_k, const double* top_p, const double* min_p,
            float* log_probs, float* entropies, int64_t num_rows, int64_t vocab, cudaStream_t stream) {
  RS_LAUNCH(truncated_log_softmax<T>, dim3((unsigned)num_rows), kThreads, stream, (const T*)logits, temperatures, top_k, top_p, min_p,
            log_probs, entropies, vocab);
}

}  // namespace
}  // namespace rs

// Queues rs_truncated_log_softmax (truncation.cpp) of rows on the device. Returns a cudaError_t.
extern "C" __attribute__((visibility("default"))) int rs_truncated_log_softmax_on_stream(
    int is_bf16, const void* logits, const float* temperatures, const int64_t* top_k, const double* top_p, const double* min_p,
    float* log_probs, float* entropies, int64_t num_rows, int64_t vocab, void* on_stream) {
  if (num_rows == 0) return (int)cudaSuccess;
  const auto launch = is_bf16 ? rs::launch<rs::Brain16> : rs::launch<float>;
  launch(logits, temperatures, top_k, top_p, min_p, log_probs, entropies, num_rows, vocab, (cudaStream_t)on_stream);
  return (int)cudaGetLastError();
}
