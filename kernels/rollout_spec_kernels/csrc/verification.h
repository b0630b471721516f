// Verification of a batch of draft trees: what is decided, in what order, from which noise. CPU and CUDA run this text.
//
// rollout_spec/verify/ defines the six schemes and says why they are exact; this is the same arithmetic without V-wide copies. Whatever
// the readable verifiers refuse is declined here, so that they give the message.
//
// A `Team` is whatever works on one request together: a CPU thread with its vectors, or a CUDA block. It offers
//     sums<Chains>(law, stage)        RowSums of one more refusal
//     draw(law, uniform)              a token of the law by inverse CDF, -1 if it has no mass or a NaN
//     race(log_probs, vocab, key)     argmax log p + G
//     leads()                         true in the one thread that writes results
//     sync()                          waits for the team
// Every thread of a team decides the same from the same numbers; what it keeps in memory is read before a sum or sync() and written after.
//
// Legend: B requests, N nodes (padded), V target vocabulary, Vd draft vocabulary.
#pragma once

#include "law.h"

namespace rs {

enum Scheme : int64_t { kRejection, kBlock, kExactMatch, kGumbel, kRejectionWalk, kTraversal };

// Mirrored by _Verification in verify.py, field by field.
struct Verification {
  int64_t scheme, threads, batch, max_nodes, num_rows, vocab, draft_vocab;
  double sum_tolerance;                        // how far a draft distribution's sum may be from 1
  const int64_t *tokens, *parents, *lengths;   // [B, N] nodes, parents before children, -1 = the root; [B] how many
  const float* draft_probs;                    // [B, N, Vd], read by the schemes that divide by it
  const int64_t* draft_token_ids;              // [Vd] the token of each column, or null: column c is token c
  int32_t* column_of;                          // [V], with draft_token_ids only (Law)
  const float* log_probs;                      // [R, V], or null: then rows come one by one
  const int64_t* roots;                        // [B] row of each request's root; its node n has row root + 1 + n
  const float* const* rows;                    // [B, N + 1] rows after the root and each node, null = not computed yet; or null
  const float* entropies_in;                   // [R] of log_probs, or null: then no scores are written
  const int64_t *seeds, *positions;            // [B] keys of the noise, or null: then the uniforms are given
  const double *accept, *recover;              // [B, N + 1], [B, N + 1] or null; accept by node, or by trial (traversal)
  int64_t *path, *num_accepted, *next_tokens;  // [B, N], [B], [B]
  bool* is_bonus;                              // [B]
  double* accept_probs;                        // [B, N]
  float *scores, *entropies;                   // [B, N + 1] log-probabilities and entropies of emitted tokens
  int64_t* deepest;                            // [B] depth of each tree's deepest node
  int64_t* wanted;                             // [B] in: kNotBegun; out: the entry of `rows` a request waits for, or kFinished
  char* state;                                 // [B, state_bytes(N)]
};

constexpr int64_t kNotBegun = -1, kFinished = -2, kDeclined = -3;

// A request's walk while it waits for rows, and the room in which it is decided. By depth: 0 is the root.
struct WalkState {
  int64_t depth, trial;
  int64_t *nodes, *refused, *cursor, *first_stage;  // [N + 1] node; children refused, where to look for the next, stages below
  double *mass, *draft_left;                        // [N + 1] a and m; block verification: w and h
  Stage* stages;                                    // [N + 1]
};

RS_HD inline int64_t state_bytes(int64_t max_nodes) { return 16 + (max_nodes + 1) * (4 * 8 + 2 * 8 + (int64_t)sizeof(Stage)); }

// Calls body.template operator()<kScheme>() for a scheme known at run time only; false if there is no such scheme.
template <class Body>
inline bool with_scheme(int64_t scheme, Body&& body) {
  switch (scheme) {
    case kRejection: body.template operator()<kRejection>(); return true;
    case kBlock: body.template operator()<kBlock>(); return true;
    case kExactMatch: body.template operator()<kExactMatch>(); return true;
    case kGumbel: body.template operator()<kGumbel>(); return true;
    case kRejectionWalk: body.template operator()<kRejectionWalk>(); return true;
    case kTraversal: body.template operator()<kTraversal>(); return true;
    default: return false;
  }
}

template <class Team>
class Walker {
 public:
  RS_HD Walker(const Verification& verification, Team& team, int64_t request) : v_(verification), team_(team), b_(request) {
    const int64_t n = v_.max_nodes + 1;
    header_ = (int64_t*)(v_.state + b_ * state_bytes(v_.max_nodes));
    int64_t* at = header_ + 2;
    s_.nodes = at;
    s_.refused = at + n;
    s_.cursor = at + 2 * n;
    s_.first_stage = at + 3 * n;
    s_.mass = (double*)(at + 4 * n);
    s_.draft_left = s_.mass + n;
    s_.stages = (Stage*)(s_.draft_left + n);
    s_.depth = header_[0];
    s_.trial = header_[1];
  }

  // False if a number of the nodes first, first + stride, ... is not one that the readable verifier takes.
  RS_HD bool is_sound(int64_t first, int64_t stride) const {
    if (length() < 0 || length() > v_.max_nodes) return false;
    if (!v_.rows && (v_.roots[b_] < 0 || v_.roots[b_] + length() >= v_.num_rows)) return false;
    const bool divides = v_.scheme != kExactMatch && v_.scheme != kGumbel;
    for (int64_t n = first; n < length(); n += stride) {
      if (token(n) < 0 || token(n) >= v_.vocab || parent(n) < -1 || parent(n) >= n) return false;
      for (int64_t other = 0; other < n; ++other)
        if (parent(other) == parent(n) && token(other) == token(n)) return false;
      if (divides && (column(n) < 0 || !(draft_prob(n) > 0))) return false;
    }
    return true;
  }

  RS_HD void begin() {
    int64_t deepest = 0;
    int64_t* const depths = s_.nodes;  // until the walk begins
    depths[0] = 0;
    for (int64_t n = 0; n < length(); ++n) {
      depths[n + 1] = depths[parent(n) + 1] + 1;
      deepest = depths[n + 1] > deepest ? depths[n + 1] : deepest;
    }
    team_.sync();
    v_.deepest[b_] = deepest;
    s_.depth = s_.trial = 0;
    enter(0, -1);
    s_.mass[0] = 1;
    for (int64_t i = 0; i < v_.max_nodes; ++i) {
      accept_probs(i) = nan();
      v_.path[b_ * v_.max_nodes + i] = -1;
    }
  }

  // Goes on as far as the rows allow: kFinished, kDeclined, or the row that is wanted. Rejection and block verification are decided
  // here but not emitted: their sums are independent rows, which a caller may compute side by side (look_at, choose, emit).
  template <int64_t kScheme>
  RS_HD int64_t advance() {
    int64_t outcome;
    if constexpr (kScheme == kRejection)
      outcome = test_chain();
    else if constexpr (kScheme == kBlock)
      outcome = weigh_chain();
    else if constexpr (kScheme == kRejectionWalk)
      outcome = walk();
    else if constexpr (kScheme == kTraversal)
      outcome = traverse();
    else
      outcome = follow<kScheme == kGumbel>();
    team_.sync();
    if (team_.leads()) {
      header_[0] = s_.depth;
      header_[1] = s_.trial;
    }
    return outcome;
  }

  // Rows that rejection and block verification look at.
  RS_HD int64_t num_looked_at() const {
    return v_.scheme == kBlock ? length() : (s_.depth + 1 < length() ? s_.depth + 1 : length());
  }

  // 1 - TV behind i tokens of a chain, and for block h = Z / (Z + 1 - w). False if a row is no distribution.
  RS_HD bool look_at(int64_t i) {
    const double w = s_.mass[i];
    const Stage stage{(float)w, 1, 1, -1};
    const RowSums sums = team_.template sums<true>(law(i - 1, i, 0, 0), stage);
    accept_probs(i) = sums.shared < 1 ? sums.shared : 1;
    s_.draft_left[i] = w > 0 ? stop_mass(sums.left, w) : 0;
    return is_normalised(sums);
  }

  // Block: τ = max{i : u_i < h_i}, h of the whole chain being w.
  RS_HD void choose() {
    s_.draft_left[length()] = s_.mass[length()];
    s_.depth = 0;
    for (int64_t i = 1; i <= length(); ++i)
      if (accept(i - 1, i - 1, 0) < s_.draft_left[i]) s_.depth = i;
    for (int64_t i = s_.depth + 1; i < length(); ++i) accept_probs(i) = nan();
  }

  // A chain's last token: from p at its end, else from norm((w p - q)+), or from p if that has no mass. False without a distribution.
  RS_HD bool emit() {
    const int64_t at = s_.depth;
    const bool is_bonus = at == length();
    int64_t drawn = -1;
    if (!is_bonus) {
      s_.stages[0] = {(float)s_.mass[at], 1, 1, -1};
      drawn = team_.draw(law(at - 1, at, 0, 1), recover(at));
    }
    if (drawn < 0) drawn = team_.draw(law(at - 1, -1, 0, 0), recover(at));
    for (int64_t i = 0; i < at; ++i) s_.nodes[i + 1] = i;
    return write(drawn, is_bonus);
  }

 private:
  RS_HD static double nan() { return (double)bits_as<float>(0x7fc00000); }
  RS_HD static double stop_mass(double left, double w) {
    const double total = left + (1 - w);  // in this order a node reached with w = 1 stops with probability 1, however small Z is
    return total > 0 ? left / total : 1.0;
  }

  RS_HD int64_t length() const { return v_.lengths[b_]; }
  RS_HD int64_t token(int64_t node) const { return v_.tokens[b_ * v_.max_nodes + node]; }
  RS_HD int64_t parent(int64_t node) const { return v_.parents[b_ * v_.max_nodes + node]; }
  RS_HD double& accept_probs(int64_t depth) { return v_.accept_probs[b_ * v_.max_nodes + depth]; }
  RS_HD const float* row(int64_t node) const {
    return v_.rows ? v_.rows[b_ * (v_.max_nodes + 1) + node + 1] : v_.log_probs + (v_.roots[b_] + 1 + node) * v_.vocab;
  }
  RS_HD const float* draft_row(int64_t node) const { return v_.draft_probs + (b_ * v_.max_nodes + node) * v_.draft_vocab; }
  RS_HD int64_t column(int64_t node) const { return law(-1, -1, 0, 0).column(token(node)); }
  RS_HD double draft_prob(int64_t node) const { return draft_row(node)[column(node)]; }

  // The law behind a node whose children were drawn from `child`'s row (-1: none), after `num` of the stages from `first` on.
  RS_HD Law law(int64_t node, int64_t child, int64_t first, int64_t num) const {
    return {row(node), child < 0 ? nullptr : draft_row(child), v_.draft_token_ids, v_.column_of, v_.vocab, v_.draft_vocab, s_.stages + first, num};
  }

  // Acceptance uniform of a node or trial; keyed noise counts (depth, trial) along diagonals (CounterNoise).
  RS_HD double accept(int64_t index, int64_t depth, int64_t trial) const {
    if (v_.accept) return v_.accept[b_ * (v_.max_nodes + 1) + index];
    const int64_t diagonal = depth + trial;
    return uniform_at({v_.seeds[b_], kAccept, v_.positions[b_]}, diagonal * (diagonal + 1) / 2 + trial);
  }
  RS_HD double recover(int64_t depth) const {
    if (v_.recover) return v_.recover[b_ * (v_.max_nodes + 1) + depth];
    return uniform_at({v_.seeds[b_], kRecover, v_.positions[b_] + depth}, 0);
  }

  // The first child of a node among the nodes from `begin` on, or -1.
  RS_HD int64_t next_child(int64_t node, int64_t begin) const {
    for (int64_t n = begin > node + 1 ? begin : node + 1; n < length(); ++n)
      if (parent(n) == node) return n;
    return -1;
  }

  RS_HD bool is_normalised(const RowSums& sums) const {
    const double off = sums.draft - 1;
    return off <= v_.sum_tolerance && -off <= v_.sum_tolerance && sums.target == sums.target;
  }

  RS_HD void enter(int64_t depth, int64_t node) {
    s_.nodes[depth] = node;
    s_.refused[depth] = s_.cursor[depth] = 0;
    s_.draft_left[depth] = 1;
    s_.first_stage[depth] = depth ? s_.first_stage[depth - 1] + s_.refused[depth - 1] : 0;
  }

  // Rejection: how many tokens pass u q(x) < p(x).
  RS_HD int64_t test_chain() {
    for (; s_.depth < length(); ++s_.depth) {
      const int64_t i = s_.depth;
      if (!row(i - 1)) return i;
      const double p = law(i - 1, -1, 0, 0).prob(token(i));
      if (p != p) return kDeclined;
      s_.mass[i] = 1;
      if (!(accept(i, i, 0) * draft_prob(i) < p)) return kFinished;
    }
    return row(s_.depth - 1) ? kFinished : s_.depth;
  }

  // Block: w_i = min(1, w_{i-1} p(x_i) / q(x_i)); every row is needed, so all were asked for.
  RS_HD int64_t weigh_chain() {
    for (int64_t i = 0; i <= length(); ++i)
      if (!row(i - 1)) return i;
    for (int64_t i = 0; i < length(); ++i) {
      const double p = law(i - 1, -1, 0, 0).prob(token(i)), ratio = s_.mass[i] * p / draft_prob(i);
      if (p != p) return kDeclined;
      s_.mass[i + 1] = ratio < 1 ? ratio : 1;
    }
    return kFinished;
  }

  // Exact match and its Gumbel-coupled form: the target draws at every row and goes on as long as it draws what was drafted.
  template <bool kRaces>
  RS_HD int64_t follow() {
    for (;;) {
      team_.sync();
      const int64_t depth = s_.depth, node = s_.nodes[depth];
      if (!row(node)) return node + 1;
      const int64_t drawn = kRaces ? team_.race(row(node), v_.vocab, {v_.seeds[b_], kTarget, v_.positions[b_] + depth})
                                   : team_.draw(law(node, -1, 0, 0), recover(depth));
      const int64_t first = next_child(node, 0);
      int64_t hit = -1;
      double mass = 0;
      for (int64_t child = first; child >= 0; child = next_child(node, child + 1)) {
        if (token(child) == drawn) hit = child;
        if (!kRaces) mass += law(node, -1, 0, 0).prob(token(child));
      }
      if (first >= 0) accept_probs(depth) = kRaces ? (double)(hit >= 0) : (mass < 1 ? mass : 1);
      if (hit < 0) return write(drawn, first < 0) ? kFinished : kDeclined;
      s_.depth = depth + 1;
      enter(depth + 1, hit);
    }
  }

  // Children in draw order against what is left of p and q; descends at the first that is accepted.
  RS_HD int64_t walk() {
    for (;;) {
      team_.sync();
      const int64_t depth = s_.depth, node = s_.nodes[depth], first = next_child(node, 0);
      if (!row(node)) return node + 1;
      int64_t child = first, trial = 0;
      double draft_left = 1;
      for (; child >= 0; child = next_child(node, child + 1), ++trial) {
        const double p = law(node, first, 0, trial).prob(token(child));
        if (p != p) return kDeclined;
        if (accept(child, depth, trial) * (draft_row(first)[column(child)] / draft_left) < p) break;
        const double rest = refuse(node, first, child, 0, trial, 1.0, draft_left).rest;
        if (!(rest >= 0)) return kDeclined;
        draft_left = rest;
      }
      if (first >= 0) accept_probs(depth) = child >= 0;
      if (child < 0) return write(team_.draw(law(node, first, 0, trial), recover(depth)), first < 0) ? kFinished : kDeclined;
      s_.depth = depth + 1;
      enter(depth + 1, child);
    }
  }

  struct Refusal {
    double left, rest;  // Z, and what q has behind the child; rest < 0 if a row is no distribution
  };

  // Adds the stage that refuses a child of a node: w is what the node's law is scaled by, draft_left what q holds before.
  RS_HD Refusal refuse(int64_t node, int64_t first_child, int64_t child, int64_t first_stage, int64_t num, double w, double draft_left) {
    Stage stage{(float)w, (float)(1 / draft_left), 0, column(child)};
    const RowSums sums = team_.template sums<false>(law(node, first_child, first_stage, num), stage);
    if (!is_normalised(sums)) return {0, -1};
    constexpr double kTiny = 1.17549435e-38;  // 1 / Z must not overflow
    stage.inverse_left = sums.left > 0 ? (float)(1 / (sums.left > kTiny ? sums.left : kTiny)) : 0.0f;
    s_.stages[first_stage + num] = stage;
    return {sums.left, sums.rest > kTiny ? sums.rest : kTiny};
  }

  // Traversal: leaf by leaf, in draw order, towards the root.
  RS_HD int64_t traverse() {
    for (;;) {
      team_.sync();
      const int64_t wanted = descend();
      if (wanted != kFinished) return wanted;
      if (accept(s_.trial, 0, s_.trial) < s_.mass[s_.depth]) {
        const int64_t node = s_.nodes[s_.depth];
        return row(node) ? finish_traversal() : node + 1;
      }
      s_.trial += 1;
      if (!retreat()) return kDeclined;
    }
  }

  // Down along the first children that are left, to a leaf or to a = 0, computing a on the way.
  RS_HD int64_t descend() {
    for (;;) {
      const int64_t depth = s_.depth, node = s_.nodes[depth], num = s_.refused[depth];
      const int64_t child = s_.mass[depth] > 0 ? next_child(node, s_.cursor[depth]) : -1;
      if (child < 0) return kFinished;
      if (!row(node)) return node + 1;
      const double p = law(node, child, s_.first_stage[depth], num).prob(token(child));
      if (p != p) return kDeclined;
      const double mass = s_.mass[depth] * p / (draft_prob(child) / s_.draft_left[depth]);
      enter(depth + 1, child);
      s_.mass[depth + 1] = mass < 1 ? mass : 1;
      s_.depth = depth + 1;
    }
  }

  // Removes the node the walk stands at and goes back to its parent.
  RS_HD bool retreat() {
    const int64_t at = s_.depth - 1, child = s_.nodes[s_.depth], num = s_.refused[at];
    if (at < 0) return false;  // the root has a = 1: only a uniform that is no number refuses it
    const double w = s_.mass[at];
    const Refusal refusal = refuse(s_.nodes[at], child, child, s_.first_stage[at], num, w, s_.draft_left[at]);
    if (refusal.rest < 0) return false;
    s_.mass[at] = stop_mass(refusal.left, w);
    s_.draft_left[at] = refusal.rest;
    s_.refused[at] = num + 1;
    s_.cursor[at] = child + 1;
    s_.depth = at;
    return true;
  }

  RS_HD int64_t finish_traversal() {
    const int64_t depth = s_.depth, node = s_.nodes[depth], child = next_child(node, 0);
    for (int64_t i = 0; i < depth; ++i) accept_probs(i) = 1;
    if (child >= 0) accept_probs(depth) = 0;
    const int64_t drawn = team_.draw(law(node, child, s_.first_stage[depth], s_.refused[depth]), recover(depth));
    return write(drawn, child < 0) ? kFinished : kDeclined;
  }

  // The verdict of a walk that ended at nodes[0 .. depth] with this token. False if there was nothing to draw from.
  RS_HD bool write(int64_t drawn, bool is_bonus) {
    if (drawn < 0) return false;
    if (!team_.leads()) return true;
    const int64_t num = v_.max_nodes + 1, accepted = s_.depth;
    v_.num_accepted[b_] = accepted;
    v_.next_tokens[b_] = drawn;
    v_.is_bonus[b_] = is_bonus;
    for (int64_t i = 0; i < v_.max_nodes; ++i) v_.path[b_ * v_.max_nodes + i] = i < accepted ? s_.nodes[i + 1] : -1;
    if (!v_.entropies_in) return true;
    for (int64_t i = 0; i < num; ++i) {
      const bool emitted = i <= accepted;
      v_.scores[b_ * num + i] = emitted ? row(s_.nodes[i])[i < accepted ? token(s_.nodes[i + 1]) : drawn] : (float)nan();
      v_.entropies[b_ * num + i] = emitted ? v_.entropies_in[v_.roots[b_] + 1 + s_.nodes[i]] : (float)nan();
    }
    return true;
  }

  const Verification& v_;
  Team& team_;
  const int64_t b_;
  int64_t* header_;
  WalkState s_;
};

}  // namespace rs
