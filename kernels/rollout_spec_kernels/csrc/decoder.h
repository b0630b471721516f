// What a decoder's forward is given; draft.cpp runs one too.
//
// Legend: R rows, Hkv key/value heads, d head size, L layers, S slots, C slot capacity.
#pragma once

#include "api.h"

namespace rs {

struct Projection {
  const void* packed;
  const float* bias;
};

// Mirrored by _Layer in decoder.py, field by field, as Step is by _Step.
struct Layer {
  const void *input_norm, *post_norm, *q_norm, *k_norm;
  Projection qkv, out, gate_up, down;
  int64_t window;
};

struct Step {
  int64_t is_bf16, threads;
  int64_t num_layers, hidden_size, num_heads, num_kv_heads, head_dim, mlp_width;
  double eps, scale;
  int64_t num_rows, num_requests, mask_words, num_slots, capacity, layer_stride, slot_stride, head_stride;  // strides in elements
  const void *cos, *sin;                                                                                    // [R, d]
  void *k_cache, *v_cache;                                                                                  // [L, S, Hkv, C, d]
  const int64_t *row_slots, *row_indices;                                                                   // [R]
  const int64_t *row_offsets, *slots, *context_lengths, *ancestors;
  const void* final_norm;
  void *residual, *normed;  // [R, hidden], in and out
  void* const* taps;        // [L], where to leave the residual after a layer, or null
};

}  // namespace rs

// All layers and the final norm of the rows. False if the plan does not cover the rows or leaves the cache.
RS_EXPORT bool rs_decoder(const rs::Step* step, const rs::Layer* layers);
