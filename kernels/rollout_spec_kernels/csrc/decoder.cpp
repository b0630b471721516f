// All layers of a decoder in one call: the same operations in the same order, without a trip through Python between them.
//
// Legend: R rows, H query heads, Hkv key/value heads, d head size, I MLP width, L layers, S slots, C slot capacity.

#include "decoder.h"
#include "workspace.h"

namespace rs {
namespace {

class Forward {
 public:
  explicit Forward(const Step& step) : step_(step), size_(step.is_bf16 ? 2 : 4) {
    static thread_local Workspace workspace;
    const int64_t d = step.head_dim, widths[] = {(step.num_heads + 2 * step.num_kv_heads) * d, step.num_heads * d, step.num_heads * d,
                                                step.hidden_size, 2 * step.mlp_width, step.mlp_width};
    int64_t total = 0;
    for (int64_t width : widths) total += padded(width);
    char* at = (char*)workspace.floats(total / (int64_t)sizeof(float));
    void** const buffers[] = {&qkv_, &q_, &mixed_, &projected_, &gate_up_, &gated_};
    for (int i = 0; i < 6; ++i) {
      *buffers[i] = at;
      at += padded(widths[i]);
    }
  }

  bool run(const Layer* layers) const {
    const Step& s = step_;
    norm(s.residual, nullptr, layers[0].input_norm);
    for (int64_t i = 0; i < s.num_layers; ++i) {
      if (!attend(layers[i], i)) return false;
      norm(projected_, s.residual, layers[i].post_norm);
      project(layers[i].gate_up, s.normed, s.hidden_size, 2 * s.mlp_width, gate_up_);
      rs_silu_mul(s.is_bf16, gate_up_, gated_, s.num_rows, s.mlp_width, s.threads);
      project(layers[i].down, gated_, s.mlp_width, s.hidden_size, projected_);
      norm(projected_, s.residual, i + 1 < s.num_layers ? layers[i + 1].input_norm : s.final_norm);
      if (s.taps[i]) std::memcpy(s.taps[i], s.residual, s.num_rows * s.hidden_size * size_);
    }
    return true;
  }

 private:
  int64_t padded(int64_t width) const { return (step_.num_rows * width * size_ + 63) / 64 * 64; }

  void project(const Projection& projection, const void* x, int64_t num_in, int64_t num_out, void* out) const {
    rs_linear(step_.is_bf16, step_.is_bf16, x, num_in, step_.num_rows, num_in, projection.packed, projection.bias, num_out, out, step_.threads);
  }

  // normed = norm(x + residual), and residual += x if there is one.
  void norm(const void* x, void* residual, const void* weight) const {
    rs_add_rms_norm(step_.is_bf16, x, residual, weight, step_.normed, residual, step_.num_rows, step_.hidden_size, (float)step_.eps, step_.threads);
  }

  bool attend(const Layer& layer, int64_t index) const {
    const Step& s = step_;
    char *k = (char*)s.k_cache + index * s.layer_stride * size_, *v = (char*)s.v_cache + index * s.layer_stride * size_;
    project(layer.qkv, s.normed, s.hidden_size, (s.num_heads + 2 * s.num_kv_heads) * s.head_dim, qkv_);
    const bool done =
        rs_qkv_rope_store(s.is_bf16, qkv_, s.cos, s.sin, layer.q_norm, layer.k_norm, (float)s.eps, q_, k, v, s.row_slots, s.row_indices, s.num_rows,
                          s.num_heads, s.num_kv_heads, s.head_dim, s.slot_stride, s.head_stride, s.num_slots, s.capacity, s.threads) &&
        rs_attention(s.is_bf16, q_, k, v, mixed_, s.row_offsets, s.slots, s.context_lengths, s.ancestors, s.mask_words, s.num_requests, s.num_heads,
                     s.num_kv_heads, s.head_dim, s.slot_stride, s.head_stride, s.num_rows, s.num_slots, s.capacity, (float)s.scale, layer.window,
                     s.threads);
    if (done) project(layer.out, mixed_, s.num_heads * s.head_dim, s.hidden_size, projected_);
    return done;
  }

  const Step step_;
  const int64_t size_;
  void *qkv_, *q_, *mixed_, *projected_, *gate_up_, *gated_;
};

}  // namespace
}  // namespace rs

RS_EXPORT bool rs_decoder(const rs::Step* step, const rs::Layer* layers) { return rs::Forward(*step).run(layers); }
