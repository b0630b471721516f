// Verification of a batch of chains in one call: from the target's rows and the draft to verdicts and scores.
//
// rollout_spec/verify/chain.py and match.py define what is decided and say why that is exact; this is the same arithmetic without
// V-wide copies. Whatever those refuse is declined here (false), so that they give the message.
//
// Legend: B requests, N nodes (padded), R target rows, V target vocabulary, Vd draft vocabulary.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <vector>

#include "api.h"
#include "draws.h"
#include "workspace.h"

namespace rs {
namespace {

enum Scheme : int64_t { kRejection, kBlock, kExactMatch, kGumbel };
enum Stream : int64_t { kTarget = 0, kAccept = 1, kRecover = 2 };  // rollout_spec/noise.py

struct Verification {
  int64_t scheme, threads, batch, max_nodes, num_rows, vocab, draft_vocab;
  double sum_tolerance;            // how far a draft distribution's sum may be from 1
  const int64_t *tokens, *lengths;  // [B, N] drafted tokens, [B] how many of them
  const float* draft_probs;        // [B, N, Vd], read by rejection and block
  const int64_t* draft_token_ids;  // [Vd] the token of each column, or null: column c is token c
  const float *log_probs, *target_entropies;  // [R, V]; [R] or null
  const int64_t* roots;            // [B] row of each request's root; its node i has the row i + 1 behind
  const int64_t *seeds, *positions;  // [B] keys of the noise, or null: then the uniforms are given
  const double *accept, *recover;  // [B, N], [B, N + 1] or null
  int64_t *path, *num_accepted, *next_tokens;  // [B, N], [B], [B]
  uint8_t* is_bonus;               // [B]
  double* accept_probs;            // [B, N]
  float *scores, *entropies;       // [B, N + 1] log-probabilities and entropies of emitted tokens; not written without target_entropies
};

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
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

inline Vec smaller(Vec a, Vec b) { return b < a ? b : a; }

// The first n lanes of e^x; the others are zero.
inline Vec exp_first(const float* x, int64_t n) {
  const Vec e = exp(load_first(x, n));
  return n >= kLanes || iota() < (int32_t)n ? e : Vec{};
}

// What target and draft share and what the target has left (rollout_spec/verify/ratio.py), for a target scaled by w.
struct Split {
  double target = 0;  // sum p, NaN if the row holds one
  double draft = 0;   // sum q
  double shared = 0;  // sum min(p, q)
  double left = 0;    // sum (w p - q)+
};

Split split(const float* log_probs, const float* draft_probs, float w, int64_t size) {
  Sum target, draft, shared, left;
  for (int64_t v = 0; v < size; v += kLanes) {
    const Vec p = exp_first(log_probs + v, size - v), q = load_first(draft_probs + v, size - v);
    target.add(p);
    draft.add(q);
    shared.add(smaller(p, q));
    left.add(larger(Vec{}, p * splat(w) - q));
  }
  return {target.total(), draft.total(), shared.total(), left.total()};
}

class Chains {
 public:
  explicit Chains(const Verification& given) : v_(given) {}

  bool run() {
    if (!check()) return false;
    draw_uniforms();
    accepted_.assign(v_.batch, 0);
    std::fill_n(v_.accept_probs, v_.batch * v_.max_nodes, kNaN);
    if (v_.scheme == kExactMatch || v_.scheme == kGumbel)
      each_request([this](int64_t b) { follow(b); });
    else if (!decide())
      return false;
    for (int64_t b = 0; b < v_.batch; ++b) write(b);
    return !declined_;
  }

 private:
  const float* row(int64_t b, int64_t i) const { return v_.log_probs + (v_.roots[b] + i) * v_.vocab; }
  const float* draft_row(int64_t b, int64_t i) const { return v_.draft_probs + (b * v_.max_nodes + i) * v_.draft_vocab; }
  int64_t token(int64_t b, int64_t i) const { return v_.tokens[b * v_.max_nodes + i]; }
  double accept(int64_t b, int64_t i) const { return accept_[b * v_.max_nodes + i]; }
  double recover(int64_t b, int64_t i) const { return recover_[b * (v_.max_nodes + 1) + i]; }
  double target_prob(int64_t b, int64_t i) const { return std::exp((double)row(b, i)[token(b, i)]); }
  double& weight(int64_t b, int64_t i) { return weights_[b * (v_.max_nodes + 1) + i]; }
  double& stop(int64_t b, int64_t i) { return stops_[b * (v_.max_nodes + 1) + i]; }

  template <class Body>
  void each_request(Body&& body) const {
#pragma omp parallel for num_threads(threads_for(v_.batch * v_.vocab, (int)v_.threads)) schedule(dynamic)
    for (int64_t b = 0; b < v_.batch; ++b) body(b);
  }

  bool check() const {
    for (int64_t b = 0; b < v_.batch; ++b) {
      if (v_.lengths[b] < 0 || v_.lengths[b] > v_.max_nodes || v_.roots[b] < 0 || v_.roots[b] + v_.lengths[b] >= v_.num_rows) return false;
      for (int64_t i = 0; i < v_.lengths[b]; ++i)
        if (token(b, i) < 0 || token(b, i) >= v_.vocab) return false;
    }
    return true;
  }

  // Acceptance test i takes word i (i + 1) / 2 of its round's stream, a recovered token the first word of its own position's
  // (rollout_spec/verify/randomness.py, CounterNoise).
  void draw_uniforms() {
    accept_ = v_.accept;
    recover_ = v_.recover;
    if (!v_.seeds || v_.scheme == kGumbel) return;
    const int64_t num = v_.max_nodes;
    drawn_.resize(v_.batch * (2 * num + 1));
    double* const accept = drawn_.data();
    double* const recover = accept + v_.batch * num;
    std::vector<double> words(num * (num - 1) / 2 + 1);
    for (int64_t b = 0; b < v_.batch; ++b) {
      if (num && v_.scheme != kExactMatch) rs_uniforms(v_.seeds + b, v_.positions + b, kAccept, words.data(), 1, (int64_t)words.size());
      for (int64_t i = 0; i < num; ++i) accept[b * num + i] = words[i * (i + 1) / 2];
      for (int64_t i = 0; i <= v_.lengths[b]; ++i) {
        const int64_t position = v_.positions[b] + i;
        rs_uniforms(v_.seeds + b, &position, kRecover, recover + b * (num + 1) + i, 1, 1);
      }
    }
    accept_ = accept;
    recover_ = recover;
  }

  // Exact match and its Gumbel-coupled form: the target draws at every row and goes on as long as it draws what was drafted.
  void follow(int64_t b) {
    int64_t i = 0;
    for (;; ++i) {
      const int64_t drawn = v_.scheme == kGumbel ? race(b, i) : draw_target(b, i);
      v_.next_tokens[b] = drawn;
      if (drawn < 0) declined_ = true;
      if (i == v_.lengths[b]) break;
      const bool hit = drawn == token(b, i);
      v_.accept_probs[b * v_.max_nodes + i] = v_.scheme == kGumbel ? hit : std::min(1.0, target_prob(b, i));
      if (!hit) break;
    }
    accepted_[b] = i;
  }

  int64_t race(int64_t b, int64_t i) const {
    const int64_t position = v_.positions[b] + i;
    int64_t winner;
    rs_gumbel_argmax(row(b, i), v_.seeds + b, &position, kTarget, &winner, 1, v_.vocab, 1);
    return winner;
  }

  int64_t draw_target(int64_t b, int64_t i) const {
    const double uniform = recover(b, i);
    int64_t drawn;
    rs_inverse_cdf(row(b, i), &uniform, &drawn, 1, v_.vocab, 1);
    return drawn;
  }

  // Rejection and block verification.
  bool decide() {
    if (!index_columns()) return false;
    weights_.assign(v_.batch * (v_.max_nodes + 1), 1.0);
    stops_.assign(v_.batch * (v_.max_nodes + 1), 0.0);
    std::vector<std::pair<int64_t, int64_t>> rows;
    for (int64_t b = 0; b < v_.batch; ++b) {
      if (!(v_.scheme == kBlock ? weigh(b) : test(b))) return false;
      const int64_t last = v_.scheme == kBlock ? v_.lengths[b] : std::min(accepted_[b] + 1, v_.lengths[b]);
      for (int64_t i = 0; i < last; ++i) rows.emplace_back(b, i);
    }
#pragma omp parallel for num_threads(threads_for(rows.size() * v_.vocab, (int)v_.threads)) schedule(dynamic)
    for (size_t r = 0; r < rows.size(); ++r) look_at(rows[r].first, rows[r].second);
    if (declined_) return false;
    if (v_.scheme == kBlock)
      for (int64_t b = 0; b < v_.batch; ++b) choose(b);
    each_request([this](int64_t b) { emit(b); });
    return true;
  }

  // column_[token] is the token's column in a reduced vocabulary. An entry counts only if the column names the token back, so the
  // table is never cleared. False if draft_token_ids leave the vocabulary or repeat themselves.
  bool index_columns() {
    static thread_local std::vector<int32_t> table;
    if (!v_.draft_token_ids) return v_.draft_vocab == v_.vocab;
    if ((int64_t)table.size() < v_.vocab) table.resize(v_.vocab);
    column_ = table.data();
    for (int64_t c = 0; c < v_.draft_vocab; ++c) {
      if (v_.draft_token_ids[c] < 0 || v_.draft_token_ids[c] >= v_.vocab) return false;
      table[v_.draft_token_ids[c]] = (int32_t)c;
    }
    for (int64_t c = 0; c < v_.draft_vocab; ++c)
      if (table[v_.draft_token_ids[c]] != c) return false;
    return true;
  }

  // q(x) of a drafted token; 0 if it has no column.
  double draft_prob(int64_t b, int64_t i) const {
    const int64_t drafted = token(b, i);
    if (!v_.draft_token_ids) return draft_row(b, i)[drafted];
    const int64_t column = column_[drafted];
    return column >= 0 && column < v_.draft_vocab && v_.draft_token_ids[column] == drafted ? draft_row(b, i)[column] : 0.0;
  }

  // Rejection: how many tokens pass u q(x) < p(x). False if a probability is not one that its token was drawn with.
  bool test(int64_t b) {
    accepted_[b] = v_.lengths[b];
    for (int64_t i = v_.lengths[b] - 1; i >= 0; --i) {
      const double p = target_prob(b, i), q = draft_prob(b, i);
      if (!(q > 0) || std::isnan(p)) return false;
      if (!(accept(b, i) * q < p)) accepted_[b] = i;
    }
    return true;
  }

  // Block: w_i = min(1, w_{i-1} p(x_i) / q(x_i)).
  bool weigh(int64_t b) {
    for (int64_t i = 0; i < v_.lengths[b]; ++i) {
      const double p = target_prob(b, i), q = draft_prob(b, i);
      if (!(q > 0) || std::isnan(p)) return false;
      weight(b, i + 1) = std::min(1.0, weight(b, i) * p / q);
    }
    return true;
  }

  // 1 - TV behind a prefix, and for block h = Z / (Z + 1 - w).
  void look_at(int64_t b, int64_t i) {
    const double w = weight(b, i);
    const Split sums = split_row(row(b, i), draft_row(b, i), (float)w);
    if (!(std::abs(sums.draft - 1) <= v_.sum_tolerance) || std::isnan(sums.target)) declined_ = true;
    v_.accept_probs[b * v_.max_nodes + i] = std::min(1.0, sums.shared);
    const double total = sums.left + (1 - w);
    stop(b, i) = w > 0 ? (total > 0 ? sums.left / total : 1.0) : 0.0;
  }

  // A reduced vocabulary names the tokens that q can draw; of the others, which hold what is missing to 1, the target keeps all.
  Split split_row(const float* log_probs, const float* draft_probs, float w) const {
    if (!v_.draft_token_ids) return split(log_probs, draft_probs, w, v_.vocab);
    float* const named = scratch();
    for (int64_t c = 0; c < v_.draft_vocab; ++c) named[c] = log_probs[v_.draft_token_ids[c]];
    Split sums = split(named, draft_probs, w, v_.draft_vocab);
    sums.left += w * std::max(0.0, 1 - sums.target);
    return sums;
  }

  // Block: τ = max{i : u_i < h_i}, h of the whole chain being w.
  void choose(int64_t b) {
    const int64_t length = v_.lengths[b];
    stop(b, length) = weight(b, length);
    for (int64_t i = 1; i <= length; ++i)
      if (accept(b, i - 1) < stop(b, i)) accepted_[b] = i;
    for (int64_t i = accepted_[b] + 1; i < length; ++i) v_.accept_probs[b * v_.max_nodes + i] = kNaN;
  }

  // The last token: from p at a chain's end, else from norm((w p - q)+), or from p if that has no mass.
  void emit(int64_t b) {
    const int64_t at = accepted_[b];
    int64_t& drawn = v_.next_tokens[b];
    static thread_local std::vector<double> edges;
    const bool refused = at < v_.lengths[b];
    if (refused) drawn = inverse_cdf(Weights{residual(row(b, at), draft_row(b, at), (float)weight(b, at))}, recover(b, at), v_.vocab, edges);
    if (!refused || edges.back() == 0) drawn = draw_target(b, at);
    if (drawn < 0) declined_ = true;
  }

  const float* residual(const float* log_probs, const float* draft_probs, float w) const {
    float* const left = scratch();
    for (int64_t v = 0; v < v_.vocab; v += kLanes) {
      Vec p = exp_first(log_probs + v, v_.vocab - v) * splat(w);
      if (!v_.draft_token_ids) p -= smaller(p, load_first(draft_probs + v, v_.vocab - v));
      store_first(left + v, p, v_.vocab - v);
    }
    if (v_.draft_token_ids)
      for (int64_t c = 0; c < v_.draft_vocab; ++c) {
        float& p = left[v_.draft_token_ids[c]];
        p -= std::min(p, draft_probs[c]);
      }
    return left;
  }

  float* scratch() const {
    static thread_local Workspace workspace;
    return workspace.floats(v_.vocab);
  }

  void write(int64_t b) const {
    const int64_t accepted = accepted_[b];
    v_.num_accepted[b] = accepted;
    v_.is_bonus[b] = accepted == v_.lengths[b];
    for (int64_t i = 0; i < v_.max_nodes; ++i) v_.path[b * v_.max_nodes + i] = i < accepted ? i : -1;
    if (!v_.target_entropies || declined_) return;
    for (int64_t i = 0; i <= v_.max_nodes; ++i) {
      const int64_t at = b * (v_.max_nodes + 1) + i;
      v_.scores[at] = i > accepted ? (float)kNaN : row(b, i)[i < accepted ? token(b, i) : v_.next_tokens[b]];
      v_.entropies[at] = i > accepted ? (float)kNaN : v_.target_entropies[v_.roots[b] + i];
    }
  }

  const Verification& v_;
  const double *accept_ = nullptr, *recover_ = nullptr;
  std::vector<double> drawn_, weights_, stops_;
  std::vector<int64_t> accepted_;
  const int32_t* column_ = nullptr;
  std::atomic<bool> declined_ = false;
};

}  // namespace
}  // namespace rs

// False if this is not a batch it verifies: something that the readable verifier refuses, or finds in a row.
RS_EXPORT bool rs_verify_chains(const void* verification) { return rs::Chains(*(const rs::Verification*)verification).run(); }
