// The C interface's spelling, and how a flag becomes a type.
#pragma once

#include "simd.h"

#define RS_EXPORT extern "C" __attribute__((visibility("default")))

// Shared by decoder.cpp and verify.cpp; each is described where it is defined.
RS_EXPORT void rs_linear(int in_bf16, int out_bf16, const void* x, int64_t x_stride, int64_t num_rows, int64_t num_in, const void* packed,
                         const float* bias, int64_t num_out, void* out, int threads);
RS_EXPORT void rs_add_rms_norm(int is_bf16, const void* x, const void* residual, const void* weight, void* normed, void* total,
                               int64_t num_rows, int64_t size, float eps, int threads);
RS_EXPORT bool rs_qkv_rope_store(int is_bf16, const void* qkv, const void* cos, const void* sin, const void* q_norm, const void* k_norm,
                                 float eps, void* q, void* k_cache, void* v_cache, const int64_t* slots, const int64_t* indices,
                                 int64_t num_rows, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim, int64_t cache_slot_stride,
                                 int64_t cache_head_stride, int64_t num_slots, int64_t capacity, int threads);
RS_EXPORT bool rs_attention(int is_bf16, const void* q, const void* k_cache, const void* v_cache, void* out, const int64_t* row_offsets,
                            const int64_t* slots, const int64_t* context_lengths, const int64_t* ancestors, int64_t mask_words,
                            int64_t num_requests, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim, int64_t slot_stride,
                            int64_t head_stride, int64_t num_rows, int64_t num_slots, int64_t capacity, float scale, int64_t window,
                            int threads);
RS_EXPORT void rs_silu_mul(int is_bf16, const void* gate_up, void* out, int64_t num_rows, int64_t size, int threads);
RS_EXPORT void rs_uniforms(const int64_t* seeds, const int64_t* positions, int64_t stream, double* uniforms, int64_t num_rows, int64_t num);
RS_EXPORT void rs_gumbel_argmax(const float* log_probs, const int64_t* seeds, const int64_t* positions, int64_t stream, int64_t* token_ids,
                                int64_t num_rows, int64_t vocab, int threads);
RS_EXPORT void rs_inverse_cdf(const float* log_probs, const double* uniforms, int64_t* token_ids, int64_t num_rows, int64_t vocab, int threads);

namespace rs {

constexpr int64_t kMaxHeadDim = 512;

// Calls body.template operator()<T>() with T = bf16 or float.
template <class Body>
inline void with_type(int is_bf16, Body&& body) {
  if (is_bf16)
    body.template operator()<bf16>();
  else
    body.template operator()<float>();
}

// Threads worth waking for this many element operations: below some 10 us of work a second thread costs more than it saves.
inline int threads_for(int64_t num_elements, int threads) { return num_elements < 32 * 1024 ? 1 : threads; }

}  // namespace rs
