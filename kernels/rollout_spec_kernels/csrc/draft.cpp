// Chains of a recurrent draft head in one call: the rows whose target states arrived, then step after step head, draw, and the drawn
// token fed back. rollout_spec/engine/draft_head.py is the readable form; the operations are the same, so hidden states and logits are
// its bits.
//
// Legend: B requests, R new rows, A requests that still draft, K steps, T tapped layers, H hidden size, d head size, V vocabulary,
// Vd draft vocabulary, S slots, C slot capacity.

#include <algorithm>
#include <limits>
#include <vector>

#include "decoder.h"
#include "draws.h"
#include "workspace.h"

namespace rs {
namespace {

// Mirrored by _Head in draft.py, field by field.
struct Head {
  int64_t is_bf16, hidden_size, num_heads, num_kv_heads, head_dim, mlp_width, num_taps, vocab, draft_vocab;
  double eps, scale;
  const void* const* tap_norms;  // [T], or null: the only tap is the state
  Projection tap_fc, fc, head;
  const void *embed_norm, *hidden_norm, *final_norm;
  const void* embedding;      // [V, H]
  const int64_t* token_ids;   // [Vd], or null
  const Layer* layer;
};

// Mirrored by _Round in draft.py, field by field.
struct Round {
  int64_t threads, num_requests, num_rows, num_steps, num_slots, capacity, slot_stride, head_stride;
  int64_t coupled;                                           // to the target's own noise, else independent draws
  const void* const* taps;                                   // [T], each [R, H]
  const int64_t *tokens, *row_offsets, *slots, *contexts;    // [R], [B + 1], [B], [B]
  const void *cos, *sin;                                     // [C, d]
  void *k_cache, *v_cache;                                   // [S, Hkv, C, d]
  void* states;                                              // [B, H] out, or null: after each request's last new row
  const int64_t* lengths;                                    // [B] drafts wanted
  const float* inv_temperatures;                             // [B], 0 = greedy
  const int64_t *seeds, *positions;                          // [B] keys of the noise of the first step
  int64_t* drawn;                                            // [B, K] out
  float* probs;                                              // [B, K, Vd] out, or null
};

constexpr int64_t kDone = 0, kOutside = -1;  // a positive status is 1 + the request whose logits define no distribution
constexpr int64_t kLane = int64_t{1} << 40;  // rollout_spec/noise.py
constexpr int64_t kRacePiece = 2048;         // columns of one work item of a race

class Chains {
 public:
  Chains(const Head& head, const Round& round)
      : head_(head), round_(round), size_(head.is_bf16 ? 2 : 4), row_bytes_(head.hidden_size * size_) {
    static thread_local Workspace workspace;
    const int64_t num_taps = head.tap_norms ? head.num_taps : 0, rotary = head.head_dim * size_;
    const int64_t widths[] = {num_taps * row_bytes_, row_bytes_, 2 * row_bytes_, row_bytes_, row_bytes_, rotary, rotary};
    char** const buffers[] = {&tapped_, &state_, &joined_, &residual_, &normed_, &cos_, &sin_};
    const int64_t rows = std::max(round.num_rows, round.num_requests), logits = padded(round.num_requests * head.draft_vocab * sizeof(float));
    int64_t total = logits;
    for (int64_t width : widths) total += padded(rows * width);
    char* at = (char*)workspace.floats(total / (int64_t)sizeof(float));
    logits_ = (float*)at;
    at += logits;
    for (int i = 0; i < 7; ++i) {
      *buffers[i] = at;
      at += padded(rows * widths[i]);
    }
  }

  int64_t run() {
    if (!is_inside() || !absorb()) return kOutside;
    for (int64_t b = 0; b < round_.num_requests; ++b) {
      const int64_t length = std::max<int64_t>(0, round_.lengths[b]);
      if (length > 0) {
        std::memcpy(state_ + (int64_t)active_.size() * row_bytes_, normed_ + (round_.row_offsets[b + 1] - 1) * row_bytes_, row_bytes_);
        active_.push_back(b);
      }
      const int64_t undrafted = b * round_.num_steps + length, end = (b + 1) * round_.num_steps;
      std::fill(round_.drawn + undrafted, round_.drawn + end, 0);
      if (round_.probs) std::fill(round_.probs + undrafted * head_.draft_vocab, round_.probs + end * head_.draft_vocab, 0.0f);
    }
    for (int64_t step = 0; !active_.empty(); ++step) {
      rs_linear(head_.is_bf16, 0, state_, head_.hidden_size, (int64_t)active_.size(), head_.hidden_size, head_.head.packed, head_.head.bias,
                head_.draft_vocab, logits_, (int)round_.threads);
      if (const int64_t failed = round_.coupled ? draw_coupled(step) : draw_independently(step)) return failed;
      drop_done(step + 1);
      if (!active_.empty() && !feed(step)) return kOutside;
    }
    return kDone;
  }

 private:
  static int64_t padded(int64_t num_bytes) { return (num_bytes + 63) / 64 * 64; }

  // Whatever is an index lies inside what it indexes.
  bool is_inside() const {
    for (int64_t b = 0; b < round_.num_requests; ++b) {
      const int64_t rows = num_new(b), length = round_.lengths[b];
      if (rows < 0 || round_.contexts[b] < 0 || length > round_.num_steps || (rows == 0 && length > 0)) return false;
      if (round_.contexts[b] + rows + std::max<int64_t>(0, length - 1) > round_.capacity) return false;
    }
    for (int64_t r = 0; r < round_.num_rows; ++r)
      if (round_.tokens[r] < 0 || round_.tokens[r] >= head_.vocab) return false;
    return round_.row_offsets[0] == 0 && round_.row_offsets[round_.num_requests] == round_.num_rows;
  }

  int64_t num_new(int64_t b) const { return round_.row_offsets[b + 1] - round_.row_offsets[b]; }

  // The rows whose target states arrived.
  bool absorb() {
    const char* states = (const char*)round_.taps[0];
    if (head_.tap_norms) {
      const int64_t num_taps = head_.num_taps;
#pragma omp parallel for num_threads(threads_for(round_.num_rows * num_taps * head_.hidden_size, (int)round_.threads)) schedule(static)
      for (int64_t i = 0; i < round_.num_rows * num_taps; ++i)
        norm((const char*)round_.taps[i % num_taps] + i / num_taps * row_bytes_, head_.tap_norms[i % num_taps], tapped_ + i * row_bytes_);
      project(head_.tap_fc, tapped_, num_taps * head_.hidden_size, round_.num_rows, state_);
      states = state_;
    }
    row_slots_.clear();
    row_indices_.clear();
    for (int64_t b = 0; b < round_.num_requests; ++b)
      for (int64_t r = 0; r < num_new(b); ++r) {
        row_slots_.push_back(round_.slots[b]);
        row_indices_.push_back(round_.contexts[b] + r);
      }
    if (round_.num_rows > 0 && !advance(states, round_.tokens, round_.num_requests, round_.row_offsets, round_.slots, round_.contexts))
      return false;
    for (int64_t b = 0; round_.states && b < round_.num_requests; ++b) {
      char* to = (char*)round_.states + b * row_bytes_;
      if (num_new(b) > 0)
        std::memcpy(to, normed_ + (round_.row_offsets[b + 1] - 1) * row_bytes_, row_bytes_);
      else
        std::memset(to, 0, row_bytes_);
    }
    return true;
  }

  // Keeps the requests that want more drafts than `done`, and their states.
  void drop_done(int64_t done) {
    size_t kept = 0;
    for (size_t i = 0; i < active_.size(); ++i) {
      if (round_.lengths[active_[i]] <= done) continue;
      if (kept < i) std::memcpy(state_ + kept * row_bytes_, state_ + i * row_bytes_, row_bytes_);
      active_[kept++] = active_[i];
    }
    active_.resize(kept);
  }

  // The tokens drawn at a step, fed back for the requests that go on; their states are the next ones.
  bool feed(int64_t step) {
    std::vector<int64_t> tokens, offsets{0};
    row_slots_.clear();
    row_indices_.clear();
    for (int64_t b : active_) {
      tokens.push_back(round_.drawn[b * round_.num_steps + step]);
      offsets.push_back((int64_t)tokens.size());
      row_slots_.push_back(round_.slots[b]);
      row_indices_.push_back(round_.contexts[b] + num_new(b) + step);
    }
    if (!advance(state_, tokens.data(), (int64_t)active_.size(), offsets.data(), row_slots_.data(), row_indices_.data())) return false;
    std::swap(state_, normed_);
    return true;
  }

  // normed_ = the states after rows of given states and tokens, at row_indices_ of row_slots_; K and V are stored there.
  bool advance(const char* states, const int64_t* tokens, int64_t num_requests, const int64_t* offsets, const int64_t* slots,
               const int64_t* contexts) {
    const int64_t num_rows = offsets[num_requests], rotary = head_.head_dim * size_;
#pragma omp parallel for num_threads(threads_for(2 * num_rows * head_.hidden_size, (int)round_.threads)) schedule(static)
    for (int64_t r = 0; r < num_rows; ++r) {
      norm((const char*)head_.embedding + tokens[r] * row_bytes_, head_.embed_norm, joined_ + 2 * r * row_bytes_);
      norm(states + r * row_bytes_, head_.hidden_norm, joined_ + (2 * r + 1) * row_bytes_);
      std::memcpy(cos_ + r * rotary, (const char*)round_.cos + row_indices_[r] * rotary, rotary);
      std::memcpy(sin_ + r * rotary, (const char*)round_.sin + row_indices_[r] * rotary, rotary);
    }
    project(head_.fc, joined_, 2 * head_.hidden_size, num_rows, residual_);
    void* const no_taps[] = {nullptr};
    const Step step{
        .is_bf16 = head_.is_bf16, .threads = round_.threads, .num_layers = 1, .hidden_size = head_.hidden_size, .num_heads = head_.num_heads,
        .num_kv_heads = head_.num_kv_heads, .head_dim = head_.head_dim, .mlp_width = head_.mlp_width, .eps = head_.eps, .scale = head_.scale,
        .num_rows = num_rows, .num_requests = num_requests, .mask_words = 0, .num_slots = round_.num_slots, .capacity = round_.capacity,
        .layer_stride = 0, .slot_stride = round_.slot_stride, .head_stride = round_.head_stride, .cos = cos_, .sin = sin_,
        .k_cache = round_.k_cache, .v_cache = round_.v_cache, .row_slots = row_slots_.data(), .row_indices = row_indices_.data(),
        .row_offsets = offsets, .slots = slots, .context_lengths = contexts, .ancestors = nullptr, .final_norm = head_.final_norm,
        .residual = residual_, .normed = normed_, .taps = no_taps};
    return rs_decoder(&step, head_.layer);
  }

  void norm(const char* x, const void* weight, char* to) const {
    rs_add_rms_norm(head_.is_bf16, x, nullptr, weight, to, nullptr, 1, head_.hidden_size, (float)head_.eps, 1);
  }

  void project(const Projection& projection, const char* x, int64_t num_in, int64_t num_rows, char* out) const {
    rs_linear(head_.is_bf16, head_.is_bf16, x, num_in, num_rows, num_in, projection.packed, projection.bias, head_.hidden_size, out,
              (int)round_.threads);
  }

  int64_t draw_independently(int64_t step) {
    const int64_t count = (int64_t)active_.size(), vocab = head_.draft_vocab;
    std::vector<int64_t> columns(count);
#pragma omp parallel num_threads(threads_for(2 * count * vocab, count > 1 ? (int)round_.threads : 1))
    {
      std::vector<double> edges;
#pragma omp for schedule(static)
      for (int64_t i = 0; i < count; ++i) {
        const int64_t b = active_[i], at = b * round_.num_steps + step;
        if (round_.inv_temperatures[b] == 0)
          columns[i] = point_mass(logits_ + i * vocab, vocab, round_.probs + at * vocab);
        else
          columns[i] = draw_from_softmax(logits_ + i * vocab, round_.inv_temperatures[b],
                                         uniform_at({round_.seeds[b], kDraft, round_.positions[b] + step * kLane}, 0), vocab,
                                         round_.probs + at * vocab, edges);
      }
    }
    return record(columns, step);
  }

  int64_t draw_coupled(int64_t step) {
    const int64_t count = (int64_t)active_.size(), vocab = head_.draft_vocab, pieces = (vocab + kRacePiece - 1) / kRacePiece;
    std::vector<Winner> winners(count * pieces);
    std::vector<int64_t> columns(count);
#pragma omp parallel for num_threads(threads_for(4 * count * vocab, (int)round_.threads)) schedule(static)
    for (int64_t i = 0; i < count * pieces; ++i) {
      const int64_t row = i / pieces, b = active_[row], begin = i % pieces * kRacePiece;
      const NoiseKey key{round_.seeds[b], kTarget, round_.positions[b] + step};
      const float scale = round_.inv_temperatures[b];
      if (scale > 0) winners[i] = gumbel_race(logits_ + row * vocab, scale, key, head_.token_ids, begin, std::min(kRacePiece, vocab - begin));
    }
    for (int64_t row = 0; row < count; ++row) {
      const float* logits = logits_ + row * vocab;
      if (round_.inv_temperatures[active_[row]] == 0) {
        columns[row] = first_largest(logits, vocab);
        continue;
      }
      Winner winner = winners[row * pieces];
      for (int64_t p = 1; p < pieces; ++p)
        if (winner.loses_to(winners[row * pieces + p])) winner = winners[row * pieces + p];
      columns[row] = all_finite(logits, vocab) ? winner.index : -1;
    }
    return record(columns, step);
  }

  // Writes the tokens of the drawn columns; kDone, or the status of the first request without a distribution.
  int64_t record(const std::vector<int64_t>& columns, int64_t step) {
    for (size_t i = 0; i < columns.size(); ++i) {
      if (columns[i] < 0) return active_[i] + 1;
      round_.drawn[active_[i] * round_.num_steps + step] = head_.token_ids ? head_.token_ids[columns[i]] : columns[i];
    }
    return kDone;
  }

  const Head& head_;
  const Round& round_;
  const int64_t size_, row_bytes_;
  float* logits_;                                                           // [A, Vd]
  char *tapped_, *state_, *joined_, *residual_, *normed_, *cos_, *sin_;     // [R or A, ...]
  std::vector<int64_t> active_, row_slots_, row_indices_;
};

}  // namespace
}  // namespace rs

// 0; -1, with nothing of use written, if something lies outside of what it indexes; or 1 + the request whose logits define no distribution.
RS_EXPORT int64_t rs_draft_chains(const rs::Head* head, const rs::Round* round) { return rs::Chains(*head, *round).run(); }
