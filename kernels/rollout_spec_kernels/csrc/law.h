// The law that is left of a target's row after children were refused, token by token and never stored.
//
// With p_0 the target's row and q_0 the row its children were drawn from, refusing child number j (ALGORITHMS: rejection walk, traversal,
// and with one child rejection and block verification) leaves
//     p_{j+1} = (w_j p_j - q_j)+ / Z_j,    q_j = q_0 without the children before j, over its sum m_j,    Z_j = sum (w_j p_j - q_j)+
// which is a function of p_0(v), q_0(v) and three numbers a stage. So a V-wide row is read once for each refusal and written never.
//
// Legend: V target vocabulary, Vd draft vocabulary, k refused children.
#pragma once

#include "elementary.h"

namespace rs {

// One refused child.
struct Stage {
  float scale;          // w
  float inverse_draft;  // 1 / m
  float inverse_left;   // 1 / Z; 0 where the residual is empty: then p = q, and p itself is what is left
  int64_t column;       // the child's, in q_0
};

template <class V>
RS_HD inline V left_after(const Stage& stage, V p, V q) {
  const V scaled = p * Lanes<V>::splat(stage.scale);
  const V left = scaled - smaller(scaled, q * Lanes<V>::splat(stage.inverse_draft));
  return stage.inverse_left > 0 ? left * Lanes<V>::splat(stage.inverse_left) : p;
}

struct Law {
  const float* log_probs;     // [V] of the target
  const float* draft;         // [Vd] q_0, or null behind a leaf
  const int64_t* names;       // [Vd] the token of each column of q_0, or null: column c is token c
  const int32_t* column_of;   // [V] the column of each token with a name; other entries may be anything. Null without names
  int64_t vocab, num_columns;
  const Stage* stages;        // [k]
  int64_t num_stages;

  RS_HD int64_t token_of(int64_t column) const { return names ? names[column] : column; }

  // The token's column, or -1. An entry of column_of counts only if the column names the token back, so that the table needs no clearing.
  RS_HD int64_t column(int64_t token) const {
    if (!names) return token;
    const int64_t column = column_of[token];
    return column >= 0 && column < num_columns && names[column] == token ? column : -1;
  }

  // p_k of a column, given p_0 and q_0 there.
  RS_HD float left(int64_t column, float p, float q) const {
    for (int64_t j = 0; j < num_stages; ++j) {
      p = left_after(stages[j], p, q);
      if (stages[j].column == column) q = 0;
    }
    return p;
  }

  // p_k of a token that no column names is p_0 times this.
  RS_HD float unnamed_scale() const {
    float scale = 1;
    for (int64_t j = 0; j < num_stages; ++j) scale = left_after(stages[j], scale, 0.0f);
    return scale;
  }

  // p_k of any token.
  RS_HD float weight(int64_t token) const {
    const float p = exponential(log_probs[token]);
    if (num_stages == 0) return p;
    const int64_t at = column(token);
    return left(at, p, at < 0 ? 0.0f : draft[at]);
  }

  // p_k of a drafted token in double, where a test against a 53-bit uniform wants it.
  RS_HD double prob(int64_t token) const { return num_stages == 0 ? ::exp((double)log_probs[token]) : (double)weight(token); }
};

// Sums over q_0's columns, of the stage that refuses one more child.
struct RowSums {
  double target = 0;  // sum p_0, NaN if the row holds one
  double draft = 0;   // sum q_0
  double shared = 0;  // sum min(p_0, q_0), of chains only
  double left = 0;    // sum (w p_k - q_k)+, tokens without a column included
  double rest = 0;    // sum of q_0 over the columns that were not refused, nor are now; of trees only
};

// What one column adds to them.
template <class V>
struct Terms {
  V target, draft, shared, left, rest;
};

// Terms of columns none of which was refused, before or now.
template <class V>
RS_HD inline Terms<V> terms_of(const Law& law, const Stage& next, V p, V q) {
  V current = p;
  for (int64_t j = 0; j < law.num_stages; ++j) current = left_after(law.stages[j], current, q);
  const V scaled = current * Lanes<V>::splat(next.scale);
  return {p, q, smaller(p, q), scaled - smaller(scaled, q * Lanes<V>::splat(next.inverse_draft)), q};
}

// Terms of any column.
RS_HD inline Terms<float> terms_at(const Law& law, const Stage& next, int64_t column) {
  const float p = exponential(law.log_probs[law.token_of(column)]), q = law.draft[column];
  bool refused = false;
  for (int64_t j = 0; j < law.num_stages; ++j) refused |= law.stages[j].column == column;
  const float scaled = law.left(column, p, q) * next.scale;
  const float left = scaled - smaller(scaled, refused ? 0.0f : q * next.inverse_draft);
  return {p, q, smaller(p, q), left, refused || column == next.column ? 0.0f : q};
}

// What the tokens without a column add to `left`: they hold what is missing to 1, and all of it is left of them.
RS_HD inline double unnamed_left(const Law& law, const Stage& next, double named_target) {
  return law.names && named_target < 1 ? (1 - named_target) * law.unnamed_scale() * next.scale : 0.0;
}

}  // namespace rs
