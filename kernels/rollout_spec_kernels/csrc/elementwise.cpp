// RMS norm, rotary embedding with K/V store, SiLU gate and cache compaction, each with the roundings transformers makes:
// a product or norm that transformers leaves in bf16 is rounded to bf16 here too, so that float32 temporaries change no token.
//
// Legend: M or R rows, H hidden size or query heads, Hkv key/value heads, d head size, S slots, C slot capacity, I MLP width.

#include <initializer_list>

#include "api.h"

namespace rs {
namespace {

// to = weight * cast(x / sqrt(mean(x^2) + eps)); x may be to.
template <class T>
inline void rms_norm_row(const T* x, const T* weight, T* to, int64_t size, float eps) {
  Vec squares = {};
  for (int64_t i = 0; i < size; i += kLanes) {
    const Vec value = load_first(x + i, size - i);
    squares = fma(value, value, squares);
  }
  const Vec scale = splat(1.0f / std::sqrt(sum_lanes(squares) / (float)size + eps));
  for (int64_t i = 0; i < size; i += kLanes) {
    const Vec normed = rounded_to<T>(load_first(x + i, size - i) * scale);
    store_first(to + i, normed * load_first(weight + i, size - i), size - i);
  }
}

template <class T>
void add_rms_norm(const T* x, const T* residual, const T* weight, T* normed, T* total, int64_t num_rows, int64_t size, float eps, int threads) {
#pragma omp parallel for num_threads(threads_for(num_rows * size, threads)) schedule(static)
  for (int64_t row = 0; row < num_rows; ++row) {
    const T* source = x + row * size;
    if (residual) {
      const T* old = residual + row * size;
      T* sum = total + row * size;
      for (int64_t i = 0; i < size; i += kLanes) store_first(sum + i, load_first(source + i, size - i) + load_first(old + i, size - i), size - i);
      source = sum;
    }
    rms_norm_row(source, weight, normed + row * size, size, eps);
  }
}

// to = x * cos + rotate_half(x) * sin, each product rounded as a tensor would be.
template <class T>
inline void rotate(const T* x, const T* cos, const T* sin, T* to, int64_t size) {
  const int64_t half = size / 2;
  for (int64_t i = 0; i < half; i += kLanes) {
    const int64_t left = half - i;
    const Vec first = load_first(x + i, left), second = load_first(x + half + i, left);
    const Vec low = rounded_to<T>(first * load_first(cos + i, left)) + rounded_to<T>(-second * load_first(sin + i, left));
    const Vec high = rounded_to<T>(second * load_first(cos + half + i, left)) + rounded_to<T>(first * load_first(sin + half + i, left));
    store_first(to + i, low, left);
    store_first(to + half + i, high, left);
  }
}

struct RopeShape {
  int64_t num_rows, num_heads, num_kv_heads, head_dim, cache_slot_stride, cache_head_stride;
};

template <class T>
void qkv_rope_store(const T* qkv, const T* cos, const T* sin, const T* q_norm, const T* k_norm, float eps, T* q, T* k_cache, T* v_cache,
                    const int64_t* slots, const int64_t* indices, const RopeShape& shape, int threads) {
  const int64_t d = shape.head_dim, heads = shape.num_heads + 2 * shape.num_kv_heads;
#pragma omp parallel for num_threads(threads_for(shape.num_rows* heads* d, threads)) schedule(static)
  for (int64_t row = 0; row < shape.num_rows; ++row) {
    T normed[kMaxHeadDim];
    const T* source = qkv + row * heads * d;
    const int64_t cell = slots[row] * shape.cache_slot_stride + indices[row] * d;
    for (int64_t head = 0; head < shape.num_heads + shape.num_kv_heads; ++head, source += d) {
      const bool is_query = head < shape.num_heads;
      const T* norm = is_query ? q_norm : k_norm;
      T* to = is_query ? q + (row * shape.num_heads + head) * d : k_cache + cell + (head - shape.num_heads) * shape.cache_head_stride;
      if (norm) rms_norm_row(source, norm, normed, d, eps);
      rotate(norm ? normed : source, cos + row * d, sin + row * d, to, d);
    }
    for (int64_t head = 0; head < shape.num_kv_heads; ++head, source += d)
      std::memcpy(v_cache + cell + head * shape.cache_head_stride, source, d * sizeof(T));
  }
}

template <class T>
void silu_mul(const T* gate_up, T* out, int64_t num_rows, int64_t size, int threads) {
#pragma omp parallel for num_threads(threads_for(4 * num_rows * size, threads)) schedule(static)
  for (int64_t row = 0; row < num_rows; ++row) {
    const T *gate = gate_up + row * 2 * size, *up = gate + size;
    for (int64_t i = 0; i < size; i += kLanes) {
      const Vec x = load_first(gate + i, size - i);
      const Vec silu = rounded_to<T>(x / (splat(1.0f) + exp(-x)));
      store_first(out + row * size + i, silu * load_first(up + i, size - i), size - i);
    }
  }
}

}  // namespace
}  // namespace rs

RS_EXPORT int64_t rs_max_head_dim() { return rs::kMaxHeadDim; }

// residual and total may be null: then it is the plain norm of x.
RS_EXPORT void rs_add_rms_norm(int is_bf16, const void* x, const void* residual, const void* weight, void* normed, void* total,
                               int64_t num_rows, int64_t size, float eps, int threads) {
  rs::with_type(is_bf16, [&]<class T>() {
    rs::add_rms_norm((const T*)x, (const T*)residual, (const T*)weight, (T*)normed, (T*)total, num_rows, size, eps, threads);
  });
}

// False, with nothing written, if a slot or an index lies outside the cache.
RS_EXPORT bool rs_qkv_rope_store(int is_bf16, const void* qkv, const void* cos, const void* sin, const void* q_norm, const void* k_norm,
                                 float eps, void* q, void* k_cache, void* v_cache, const int64_t* slots, const int64_t* indices,
                                 int64_t num_rows, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim, int64_t cache_slot_stride,
                                 int64_t cache_head_stride, int64_t num_slots, int64_t capacity, int threads) {
  for (int64_t row = 0; row < num_rows; ++row)
    if (slots[row] < 0 || slots[row] >= num_slots || indices[row] < 0 || indices[row] >= capacity) return false;
  const rs::RopeShape shape{num_rows, num_heads, num_kv_heads, head_dim, cache_slot_stride, cache_head_stride};
  rs::with_type(is_bf16, [&]<class T>() {
    rs::qkv_rope_store((const T*)qkv, (const T*)cos, (const T*)sin, (const T*)q_norm, (const T*)k_norm, eps, (T*)q, (T*)k_cache,
                       (T*)v_cache, slots, indices, shape, threads);
  });
  return true;
}

RS_EXPORT void rs_silu_mul(int is_bf16, const void* gate_up, void* out, int64_t num_rows, int64_t size, int threads) {
  rs::with_type(is_bf16, [&]<class T>() { rs::silu_mul((const T*)gate_up, (T*)out, num_rows, size, threads); });
}

// Moves the accepted rows of every request to the front: cache row context + moves[b, i] goes to context + i. moves[b, i] < 0: nothing.
// Sources never lie before their targets and grow with i, so the rows move in order and in place.
// False, with nothing moved, if a row lies outside the cache.
RS_EXPORT bool rs_commit(void* k_cache, void* v_cache, int64_t layer_bytes, int64_t slot_bytes, int64_t head_bytes, int64_t row_bytes,
                         int64_t num_layers, int64_t num_kv_heads, const int64_t* slots, const int64_t* context_lengths,
                         const int64_t* moves, int64_t num_requests, int64_t num_moves, int64_t num_slots, int64_t capacity, int threads) {
  for (int64_t b = 0; b < num_requests; ++b) {
    if (slots[b] < 0 || slots[b] >= num_slots || context_lengths[b] < 0) return false;
    for (int64_t i = 0; i < num_moves; ++i)
      if (moves[b * num_moves + i] >= capacity - context_lengths[b]) return false;
  }
  const int64_t elements = 2 * num_layers * num_requests * num_kv_heads * num_moves * row_bytes;
#pragma omp parallel for num_threads(rs::threads_for(elements, threads)) schedule(static)
  for (int64_t layer = 0; layer < num_layers; ++layer)
    for (char* cache : {(char*)k_cache, (char*)v_cache})
      for (int64_t b = 0; b < num_requests; ++b)
        for (int64_t head = 0; head < num_kv_heads; ++head) {
          char* rows = cache + layer * layer_bytes + slots[b] * slot_bytes + head * head_bytes + context_lengths[b] * row_bytes;
          for (int64_t i = 0; i < num_moves; ++i) {
            const int64_t source = moves[b * num_moves + i];
            if (source > i) std::memcpy(rows + i * row_bytes, rows + source * row_bytes, row_bytes);
          }
        }
  return true;
}
