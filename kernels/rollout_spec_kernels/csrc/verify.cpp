// Verification on the CPU: verification.h with a thread and its vectors as the team.
//
// Legend: B requests, N nodes (padded), V target vocabulary, Vd draft vocabulary.

#include "verification.h"

#include <algorithm>
#include <atomic>
#include <vector>

#include "api.h"
#include "draws.h"
#include "workspace.h"

namespace rs {
namespace {

// Sums of probabilities are kept in double: differences of them decide.
struct Sum {
  Doubles lanes = {};
  void add(Vec x) { lanes += __builtin_convertvector(x, Doubles); }
  double total() const {
    double sum = 0;
    for (int i = 0; i < kLanes; ++i) sum += lanes[i];
    return sum;
  }
};

// The first n lanes; the others are zero.
inline Vec first(Vec x, int64_t n) { return n >= kLanes ? x : (iota() < (int32_t)n ? x : Vec{}); }

// p_0 of n columns from `column` on.
inline Vec target_probs(const Law& law, int64_t column, int64_t n) {
  if (!law.names) return first(exponential(load_first(law.log_probs + column, n)), n);
  float gathered[kLanes] = {};
  for (int64_t i = 0; i < n; ++i) gathered[i] = law.log_probs[law.names[column + i]];
  return first(exponential(load(gathered)), n);
}

inline bool is_among(int64_t column, int64_t begin, int64_t n) { return column >= begin && column < begin + n; }

// p_k of all tokens of a law without names.
struct Left {
  const Law& law;
  Vec operator()(int64_t v, int64_t n) const {
    const Vec p = first(exponential(load_first(law.log_probs + v, n)), n);
    if (law.num_stages == 0) return p;
    const Vec q = load_first(law.draft + v, n);
    Vec left = p;
    for (int64_t j = 0; j < law.num_stages; ++j) left = left_after(law.stages[j], left, q);
    for (int64_t j = 0; j < law.num_stages; ++j)
      if (const int64_t refused = law.stages[j].column; is_among(refused, v, n)) left[refused - v] = law.weight(refused);
    return left;
  }
};

class VectorTeam {
 public:
  template <bool kChains>
  RowSums sums(const Law& law, const Stage& next) const {
    Sum target, draft, shared, left, rest;
    for (int64_t c = 0; c < law.num_columns; c += kLanes) {
      const int64_t n = std::min<int64_t>(kLanes, law.num_columns - c);
      Terms<Vec> terms = terms_of(law, next, target_probs(law, c, n), load_first(law.draft + c, n));
      if constexpr (!kChains) {
        for (int64_t j = 0; j < law.num_stages; ++j) patch(law, next, law.stages[j].column, c, n, terms);
        patch(law, next, next.column, c, n, terms);
        rest.add(terms.rest);
      } else {
        shared.add(terms.shared);
      }
      target.add(terms.target);
      draft.add(terms.draft);
      left.add(terms.left);
    }
    return {target.total(), draft.total(), shared.total(), left.total() + unnamed_left(law, next, target.total()), rest.total()};
  }

  int64_t draw(const Law& law, double uniform) const {
    static thread_local std::vector<double> edges;
    if (!law.names || law.num_stages == 0) return inverse_cdf(Left{law}, uniform, law.vocab, edges);
    return inverse_cdf(Weights{all_left(law)}, uniform, law.vocab, edges);
  }

  int64_t race(const float* log_probs, int64_t vocab, const NoiseKey& key) const {
    return gumbel_race(log_probs, 1.0f, key, nullptr, 0, vocab).index;
  }

  bool leads() const { return true; }
  void sync() const {}

 private:
  // The column's own terms, if it is one of the n from `begin` on.
  static void patch(const Law& law, const Stage& next, int64_t column, int64_t begin, int64_t n, Terms<Vec>& terms) {
    if (!is_among(column, begin, n)) return;
    const Terms<float> own = terms_at(law, next, column);
    terms.left[column - begin] = own.left;
    terms.rest[column - begin] = own.rest;
  }

  // [V] p_k of a law with names: what no column names is scaled, then each column finds its token.
  static const float* all_left(const Law& law) {
    static thread_local Workspace workspace;
    float* const left = workspace.floats(law.vocab);
    const Vec scale = splat(law.unnamed_scale());
    for (int64_t v = 0; v < law.vocab; v += kLanes)
      store_first(left + v, exponential(load_first(law.log_probs + v, law.vocab - v)) * scale, law.vocab - v);
    for (int64_t c = 0; c < law.num_columns; ++c)
      left[law.names[c]] = law.left(c, exponential(law.log_probs[law.names[c]]), law.draft[c]);
    return left;
  }
};

class Batch {
 public:
  explicit Batch(const Verification& given) : v_(given) {}

  // 0 when every request has its verdict, 1 when rows are wanted, -1 if this is not a batch that is verified here.
  int run() {
    if (v_.draft_token_ids && !index_columns()) return -1;
    if (!with_scheme(v_.scheme, [this]<int64_t kScheme>() { each_request([this](int64_t b) { advance<kScheme>(b); }); })) return -1;
    bool waits = false;
    for (int64_t b = 0; b < v_.batch; ++b) {
      if (v_.wanted[b] == kDeclined) return -1;
      waits |= v_.wanted[b] >= 0;
    }
    if (waits) return 1;
    return v_.scheme == kRejection || v_.scheme == kBlock ? finish_chains() : 0;
  }

 private:
  template <class Body>
  void each_request(Body&& body) const {
#pragma omp parallel for num_threads(threads_for(v_.batch * v_.vocab, (int)v_.threads)) schedule(dynamic)
    for (int64_t b = 0; b < v_.batch; ++b) body(b);
  }

  template <int64_t kScheme>
  void advance(int64_t b) const {
    if (v_.wanted[b] == kFinished) return;
    VectorTeam team;
    Walker<VectorTeam> walker(v_, team, b);
    if (v_.wanted[b] == kNotBegun) {
      if (!walker.is_sound(0, 1)) {
        v_.wanted[b] = kDeclined;
        return;
      }
      walker.begin();
    }
    v_.wanted[b] = walker.template advance<kScheme>();
  }

  int finish_chains() const {
    std::vector<std::pair<int64_t, int64_t>> rows;
    VectorTeam team;
    for (int64_t b = 0; b < v_.batch; ++b)
      for (int64_t i = 0, num = Walker<VectorTeam>(v_, team, b).num_looked_at(); i < num; ++i) rows.emplace_back(b, i);
    std::atomic<bool> declined = false;
#pragma omp parallel for num_threads(threads_for(rows.size() * v_.vocab, (int)v_.threads)) schedule(dynamic)
    for (size_t r = 0; r < rows.size(); ++r) {
      VectorTeam own;
      if (!Walker<VectorTeam>(v_, own, rows[r].first).look_at(rows[r].second)) declined = true;
    }
    if (declined) return -1;
    each_request([&](int64_t b) {
      VectorTeam own;
      Walker<VectorTeam> walker(v_, own, b);
      if (v_.scheme == kBlock) walker.choose();
      if (!walker.emit()) declined = true;
    });
    return declined ? -1 : 0;
  }

  // False if draft_token_ids leave the vocabulary or repeat themselves.
  bool index_columns() const {
    for (int64_t c = 0; c < v_.draft_vocab; ++c) {
      if (v_.draft_token_ids[c] < 0 || v_.draft_token_ids[c] >= v_.vocab) return false;
      v_.column_of[v_.draft_token_ids[c]] = (int32_t)c;
    }
    for (int64_t c = 0; c < v_.draft_vocab; ++c)
      if (v_.column_of[v_.draft_token_ids[c]] != c) return false;
    return true;
  }

  const Verification& v_;
};

}  // namespace
}  // namespace rs

RS_EXPORT int64_t rs_verify_state_bytes(int64_t max_nodes) { return rs::state_bytes(max_nodes); }

// 0: verdicts for all; 1: rows are wanted (Verification.wanted), call again with them; -1: something that the readable verifiers refuse.
RS_EXPORT int rs_verify(const void* verification) { return rs::Batch(*(const rs::Verification*)verification).run(); }
