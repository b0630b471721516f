// Ragged tree attention over a slotted K/V cache.
//
// A work item is one key/value head of one request (or a block of its rows); all its rows and all the query heads of the group
// share each load of K and V. Two passes: every score and its maximum first, then the weights and the weighted sum of V.
//
// A row's bits depend only on its query and on the keys it sees, in order, not on the batch, the block or the gaps that other branches
// leave between them, so a tree's rows equal plain decoding's:
// - a score is one chain of multiply-adds over d, and the maximum has no order;
// - the sum of weights is taken in fixed point (2^-40), where addition is exact and has no order;
// - the weighted sum of V is one chain over keys in order, in which a hidden key adds 0 * v, a no-op.
//
// New rows of a tree may see rows that lie behind the context already (AttentionPlan.num_earlier): a row's keys end with its last bit.
//
// Legend: B requests, R rows, H query heads, Hkv key/value heads, G = H / Hkv, d head size, W mask words, chunk = kPanel keys.

#include <algorithm>
#include <limits>
#include <vector>

#include "api.h"
#include "tile.h"
#include "workspace.h"

namespace rs {
namespace {

constexpr float kHidden = -std::numeric_limits<float>::infinity();
constexpr int64_t kChunksAtOnce = 16;  // chunks of V whose weighted sum is taken before the accumulators leave the registers

struct Shape {
  int64_t num_requests, num_heads, num_kv_heads, head_dim, slot_stride, head_stride, mask_words, window;
  float scale;
};

struct Plan {
  const int64_t *row_offsets, *slots, *context_lengths;
  const uint64_t* ancestors;  // [R, W] or null
};

// What one row sees: keys [first, end), then those keys from `end` on whose bit is set in words.
struct View {
  int64_t first, end;
  const uint64_t* words;
};

// Behind the last of the context's keys and of those that are set in words: what a row sees ends with the row itself.
inline int64_t last_key(int64_t context, const uint64_t* words, int64_t num_words) {
  for (int64_t w = num_words; w-- > 0;)
    if (words[w]) return context + 64 * w + 64 - __builtin_clzll(words[w]);
  return context;
}

struct Item {
  int64_t request, kv_head, first_row, num_rows;  // first_row counts from the request's first row
};

// Fills `view` for row `row` of a request; `words` [W] receives the row's own copy of its mask, cut to the window.
View make_view(const Shape& shape, const Plan& plan, const Item& item, int64_t row, uint64_t* words) {
  const int64_t context = plan.context_lengths[item.request];
  if (!plan.ancestors) {
    const int64_t end = context + row + 1;
    return {shape.window > 0 ? std::max<int64_t>(0, end - shape.window) : 0, end, nullptr};
  }
  const uint64_t* mask = plan.ancestors + (plan.row_offsets[item.request] + row) * shape.mask_words;
  int64_t seen = 0;
  for (int64_t w = 0; w < shape.mask_words; ++w) seen += __builtin_popcountll(words[w] = mask[w]);
  // The row's position is context + seen - 1; the ancestors come in order of position, so the window drops the first ones.
  if (shape.window > 0)
    for (int64_t drop = seen - shape.window, w = 0; drop > 0; --drop) {
      while (words[w] == 0) ++w;
      words[w] &= words[w] - 1;
    }
  return {shape.window > 0 ? std::min(context, std::max<int64_t>(0, context + seen - shape.window)) : 0, context, words};
}

// Bits of the keys of [key, key + kPanel) that the row sees.
inline uint32_t visible_bits(const View& view, int64_t key, int64_t mask_words) {
  uint32_t bits = 0;
  for (int64_t i = std::max<int64_t>(0, view.first - key); i < std::min<int64_t>(kPanel, view.end - key); ++i) bits |= 1u << i;
  if (view.words)
    for (int64_t i = std::max<int64_t>(0, view.end - key); i < kPanel; ++i) {
      const int64_t ancestor = key + i - view.end;
      if (ancestor >= 64 * mask_words) break;
      bits |= (uint32_t)((view.words[ancestor / 64] >> (ancestor % 64)) & 1) << i;
    }
  return bits;
}

inline Vec hide(Vec scores, uint32_t bits) { return (((VecInt{} + (int32_t)bits) >> iota()) & 1) != 0 ? scores : splat(kHidden); }

// kLanes keys from `keys` on, kLanes 32-bit words of each from `word` on, transposed: block[i] = word `word + i` of every key. Keys from
// num_keys on, and words from num_words on, are zero. Words are moved as floats: no arithmetic touches them.
inline void transposed_words(const float* keys, int64_t num_keys, int64_t num_words, int64_t word, VecWord (&block)[kLanes]) {
  if (num_keys >= kLanes && word + kLanes <= num_words) {
#pragma GCC unroll 16
    for (int lane = 0; lane < kLanes; ++lane) block[lane] = (VecWord)load(keys + lane * num_words + word);
  } else {
    for (int64_t lane = 0; lane < kLanes; ++lane)
      block[lane] = lane < num_keys ? (VecWord)load_first(keys + lane * num_words + word, num_words - word) : VecWord{};
  }
  transpose(block);
}

// panel[i, :] = keys [0, kPanel) at dimension i as float32; keys from num_keys on are zero.
inline void transpose_keys(const float* keys, int64_t num_keys, int64_t d, float* panel) {
  VecWord block[kLanes];
  for (int64_t half = 0; half < kPanel; half += kLanes)
    for (int64_t i = 0; i < d; i += kLanes) {
      transposed_words(keys + half * d, num_keys - half, d, i, block);
      for (int64_t lane = 0; lane < std::min<int64_t>(kLanes, d - i); ++lane) store_bytes(panel + (i + lane) * kPanel + half, block[lane]);
    }
}
inline void transpose_keys(const bf16* keys, int64_t num_keys, int64_t d, float* panel) {
  const int64_t words = d / 2;  // two dimensions each
  VecWord block[kLanes];
  for (int64_t half = 0; half < kPanel; half += kLanes)
    for (int64_t i = 0; i < words; i += kLanes) {
      transposed_words((const float*)(keys + half * d), num_keys - half, words, i, block);
      for (int64_t lane = 0; lane < std::min<int64_t>(kLanes, words - i); ++lane) {
        store_bytes(panel + 2 * (i + lane) * kPanel + half, block[lane] << 16);
        store_bytes(panel + (2 * (i + lane) + 1) * kPanel + half, block[lane] & 0xffff0000u);
      }
    }
}

// kPanel columns of V from column on, as a panel with its stride; columns past d are read from a zero-padded copy.
template <class T>
inline const T* value_panel(const T* values, int64_t num_keys, int64_t d, int64_t column, T* padded, int64_t& stride) {
  stride = d;
  if (column + kPanel <= d) return values + column;
  stride = kPanel;
  for (int64_t key = 0; key < num_keys; ++key) {
    std::memset((void*)(padded + key * kPanel), 0, kPanel * sizeof(T));
    std::memcpy((void*)(padded + key * kPanel), values + key * d + column, (d - column) * sizeof(T));
  }
  return padded;
}

// Brings a chunk's rows into L2.
template <class T>
inline void prefetch_chunk(const T* rows, int64_t num_keys, int64_t d) {
  const char* at = (const char*)rows;
  const char* end = (const char*)(rows + std::max<int64_t>(0, std::min<int64_t>(kPanel, num_keys)) * d);
  for (; at < end; at += 64) __builtin_prefetch(at, 0, 2);
}

template <class T>
class Attention {
 public:
  Attention(const Shape& shape, const Plan& plan, const T* q, const T* k_cache, const T* v_cache, T* out)
      : shape_(shape), plan_(plan), q_(q), k_cache_(k_cache), v_cache_(v_cache), out_(out), group_(shape.num_heads / shape.num_kv_heads) {}

  void run(int threads) const {
    const std::vector<Item> items = make_items(threads);
#pragma omp parallel num_threads(items.size() > 1 ? threads : 1)
    {
      static thread_local Workspace workspace;
      std::vector<View> views;
      std::vector<uint64_t> words;
#pragma omp for schedule(dynamic, 1)
      for (size_t i = 0; i < items.size(); ++i) attend(items[i], workspace, views, words);
    }
  }

 private:
  // Blocks of rows: few enough queries for the scores to stay in cache, and enough items to keep the threads level.
  std::vector<Item> make_items(int threads) const {
    int64_t block = std::max<int64_t>(1, 3 * kMaxRows / group_);
    std::vector<Item> items;
    for (;; block = (block + 1) / 2) {
      items.clear();
      for (int64_t b = 0; b < shape_.num_requests; ++b) {
        const int64_t rows = plan_.row_offsets[b + 1] - plan_.row_offsets[b], count = (rows + block - 1) / block;
        for (int64_t i = 0; i < count; ++i)
          for (int64_t head = 0; head < shape_.num_kv_heads; ++head)
            items.push_back({b, head, i * rows / count, (i + 1) * rows / count - i * rows / count});
      }
      if (block == 1 || block * group_ <= kMaxRows || (int64_t)items.size() >= 4 * threads) return items;
    }
  }

  void attend(const Item& item, Workspace& workspace, std::vector<View>& views, std::vector<uint64_t>& words) const {
    const int64_t d = shape_.head_dim, num_queries = item.num_rows * group_, context = plan_.context_lengths[item.request];
    views.resize(item.num_rows);
    words.resize(item.num_rows * shape_.mask_words);
    int64_t first = std::numeric_limits<int64_t>::max(), end_key = 0;
    for (int64_t row = 0; row < item.num_rows; ++row) {
      const View& view = views[row] = make_view(shape_, plan_, item, item.first_row + row, words.data() + row * shape_.mask_words);
      first = std::min(first, view.first);
      end_key = std::max(end_key, view.words ? last_key(context, view.words, shape_.mask_words) : view.end);
    }
    const int64_t begin = first / kPanel, end = (end_key + kPanel - 1) / kPanel;
    const Tiles tiles(num_queries);
    const int64_t tile_floats = packed_floats(kMaxRows, d), columns = (d + kPanel - 1) / kPanel * kPanel;
    float* const queries = workspace.floats(tiles.count * tile_floats + kPanel * d + kPanel * kPanel + num_queries * (columns + kLanes) +
                                            (end - begin) * num_queries * kPanel);
    float* const scratch = queries + tiles.count * tile_floats;             // [d, kPanel] keys, then padded values
    float* const sums = scratch + kPanel * d + kPanel * kPanel;             // [num_queries, columns]
    float* const largest = sums + num_queries * columns;                    // [num_queries, kLanes]
    float* const scores = largest + num_queries * kLanes;                   // [chunk, num_queries, kPanel]
    const int64_t cell = plan_.slots[item.request] * shape_.slot_stride + item.kv_head * shape_.head_stride;
    for (int64_t t = 0; t < tiles.count; ++t)
      pack_rows([&](int64_t r) { return query(item, tiles.begin(t) + r); }, tiles.size(t), d, queries + t * tile_floats);
    for (int64_t i = 0; i < num_queries; ++i) store(largest + i * kLanes, splat(kHidden));
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      prefetch_chunk(k_cache_ + cell + (chunk + 1) * kPanel * d, end_key - (chunk + 1) * kPanel, d);
      transpose_keys(k_cache_ + cell + chunk * kPanel * d, end_key - chunk * kPanel, d, scratch);
      prefetch_chunk(v_cache_ + cell + chunk * kPanel * d, end_key - chunk * kPanel, d);
      score_chunk(tiles, queries, tile_floats, scratch, scores + (chunk - begin) * num_queries * kPanel);
      mask_chunk(item, views, chunk * kPanel, scores + (chunk - begin) * num_queries * kPanel, largest);
    }
    for (int64_t i = 0; i < num_queries; ++i) largest[i * kLanes] = weigh(scores + i * kPanel, num_queries * kPanel, end - begin, max_lanes(load(largest + i * kLanes)));
    std::fill(sums, sums + num_queries * columns, 0.0f);
    for (int64_t chunk = begin; chunk < end; chunk += kChunksAtOnce)
      sum_values(tiles, v_cache_ + cell + chunk * kPanel * d, end_key - chunk * kPanel, scores + (chunk - begin) * num_queries * kPanel,
                 num_queries, (T*)scratch, sums, columns);
    for (int64_t i = 0; i < num_queries; ++i) write(item, i, sums + i * columns, 1.0f / largest[i * kLanes]);
  }

  int64_t row_of(const Item& item, int64_t query) const { return plan_.row_offsets[item.request] + item.first_row + query / group_; }

  const T* query(const Item& item, int64_t index) const {
    return q_ + (row_of(item, index) * shape_.num_heads + item.kv_head * group_ + index % group_) * shape_.head_dim;
  }

  // scores[query, :] of one chunk, before scale and mask.
  void score_chunk(const Tiles& tiles, const float* queries, int64_t tile_floats, const float* panel, float* scores) const {
    for (int64_t t = 0; t < tiles.count; ++t)
      with_rows(tiles.size(t), [&]<int M>() {
        Vec acc[M][2] = {};
        accumulate<M, 1, M>(queries + t * tile_floats, panel, kPanel, shape_.head_dim, acc);
        for (int r = 0; r < M; ++r) store_pair(scores + (tiles.begin(t) + r) * kPanel, acc[r][0], acc[r][1]);
      });
  }

  void mask_chunk(const Item& item, const std::vector<View>& views, int64_t key, float* scores, float* largest) const {
    for (int64_t row = 0; row < item.num_rows; ++row) {
      const bool all = views[row].first <= key && key + kPanel <= views[row].end;
      const uint64_t bits = all ? 0 : visible_bits(views[row], key, shape_.mask_words);
      for (int64_t i = row * group_; i < (row + 1) * group_; ++i) {
        Vec a = load(scores + i * kPanel) * splat(shape_.scale), b = load(scores + i * kPanel + kLanes) * splat(shape_.scale);
        if (!all) {
          a = hide(a, (uint32_t)bits);
          b = hide(b, (uint32_t)(bits >> kLanes));
        }
        store_pair(scores + i * kPanel, a, b);
        store(largest + i * kLanes, larger(load(largest + i * kLanes), larger(a, b)));
      }
    }
  }

  // Scores of one query become weights exp(score - most) in place; returns their sum.
  static float weigh(float* scores, int64_t chunk_stride, int64_t num_chunks, float most) {
    typedef int64_t Wide __attribute__((vector_size(kLanes * 8)));
    Wide total = {};
    for (int64_t chunk = 0; chunk < num_chunks; ++chunk)
      for (int64_t half = 0; half < kPanel; half += kLanes) {
        float* at = scores + chunk * chunk_stride + half;
        const Vec weight = exp(load(at) - splat(most));
        store(at, weight);
        total += __builtin_convertvector(weight * splat(0x1p40f), Wide);
      }
    int64_t sum = 0;
    for (int lane = 0; lane < kLanes; ++lane) sum += total[lane];
    return (float)((double)sum * 0x1p-40);
  }

  // sums[query, :] += weights of up to kChunksAtOnce chunks times their values.
  void sum_values(const Tiles& tiles, const T* values, int64_t num_keys, const float* weights, int64_t num_queries, T* padded, float* sums,
                  int64_t columns) const {
    const int64_t d = shape_.head_dim, end = std::min(num_keys, kChunksAtOnce * kPanel);
    for (int64_t column = 0; column < columns; column += kPanel)
      for (int64_t t = 0; t < tiles.count; ++t)
        with_rows(tiles.size(t), [&]<int M>() {
          Vec acc[M][2];
          float* const to = sums + tiles.begin(t) * columns + column;
          for (int r = 0; r < M; ++r) load_pair(to + r * columns, acc[r][0], acc[r][1]);
          for (int64_t key = 0; key < end; key += kPanel) {
            int64_t stride;
            const int64_t here = std::min<int64_t>(kPanel, end - key);
            const T* panel = value_panel(values + key * d, here, d, column, padded, stride);
            accumulate<M, kPanel, 1>(weights + (key / kPanel * num_queries + tiles.begin(t)) * kPanel, panel, stride, here, acc);
          }
          for (int r = 0; r < M; ++r) store_pair(to + r * columns, acc[r][0], acc[r][1]);
        });
  }

  // The accumulators of bf16 pairs lie even places first (see load_pair); store_pair undoes it.
  void write(const Item& item, int64_t index, const float* sums, float scale) const {
    T* to = out_ + (query(item, index) - q_);
    for (int64_t column = 0; column < shape_.head_dim; column += kPanel) {
      T pair[kPanel];
      store_pair(pair, load(sums + column) * splat(scale), load(sums + column + kLanes) * splat(scale));
      std::memcpy((void*)(to + column), pair, std::min<int64_t>(kPanel, shape_.head_dim - column) * sizeof(T));
    }
  }

  const Shape shape_;
  const Plan plan_;
  const T *const q_, *const k_cache_, *const v_cache_;
  T* const out_;
  const int64_t group_;
};

}  // namespace
}  // namespace rs

// False, with nothing computed, if the plan does not cover the rows or leaves the cache.
RS_EXPORT bool rs_attention(int is_bf16, const void* q, const void* k_cache, const void* v_cache, void* out, const int64_t* row_offsets,
                            const int64_t* slots, const int64_t* context_lengths, const int64_t* ancestors, int64_t mask_words,
                            int64_t num_requests, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim, int64_t slot_stride,
                            int64_t head_stride, int64_t num_rows, int64_t num_slots, int64_t capacity, float scale, int64_t window,
                            int threads) {
  if (row_offsets[0] != 0 || row_offsets[num_requests] != num_rows) return false;
  for (int64_t b = 0; b < num_requests; ++b) {
    const int64_t rows = row_offsets[b + 1] - row_offsets[b];
    if (rows < 0 || slots[b] < 0 || slots[b] >= num_slots || context_lengths[b] < 0 || context_lengths[b] + rows > capacity) return false;
    for (int64_t row = row_offsets[b]; ancestors && row < row_offsets[b + 1]; ++row)
      if (rs::last_key(context_lengths[b], (const uint64_t*)ancestors + row * mask_words, mask_words) > capacity) return false;
  }
  const rs::Shape shape{num_requests, num_heads, num_kv_heads, head_dim, slot_stride, head_stride, mask_words, window, scale};
  const rs::Plan plan{row_offsets, slots, context_lengths, (const uint64_t*)ancestors};
  rs::with_type(is_bf16, [&]<class T>() {
    rs::Attention<T>(shape, plan, (const T*)q, (const T*)k_cache, (const T*)v_cache, (T*)out).run(threads);
  });
  return true;
}
