// y = x W^T + b with W in panels of kPanel output columns, k-major inside a panel.
//
// Legend: M rows of x, K input features, N output features.

#include <algorithm>

#include "api.h"
#include "tile.h"
#include "workspace.h"

namespace rs {
namespace {

constexpr int64_t kSumLength = 64;            // terms of a partial sum: an error as of 64 + K / 64 terms, not of K
constexpr int64_t kBlockFloats = 256 * 1024;  // packed rows held in L2 at a time
constexpr int64_t kSerialFloats = 8 * 1024;   // below this, packing x costs less than a barrier

// Where column c of a panel lies: bf16 pairs hold column j and j + kLanes in one 32-bit lane (see load_pair).
template <class T>
int64_t place_of(int64_t column) {
  if (sizeof(T) == 4) return column;
  return column < kLanes ? 2 * column : 2 * (column - kLanes) + 1;
}

template <class T>
void pack_weight(const T* weight, int64_t num_out, int64_t num_in, T* packed, int threads) {
  const int64_t panels = (num_out + kPanel - 1) / kPanel;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t p = 0; p < panels; ++p) {
    T* panel = packed + p * num_in * kPanel;
    for (int64_t c = 0; c < kPanel; ++c) {
      const int64_t column = p * kPanel + c, place = place_of<T>(c);
      if (column < num_out)
        for (int64_t k = 0; k < num_in; ++k) panel[k * kPanel + place] = weight[column * num_in + k];
      else
        for (int64_t k = 0; k < num_in; ++k) panel[k * kPanel + place] = T{};
    }
  }
}

template <class Out>
struct Target {
  Out* out;           // [M, N]
  const float* bias;  // [panels * kPanel], or null
  int64_t num_out;
};

template <class Out>
inline void finish(const Target<Out>& target, int64_t row, int64_t column, Vec a, Vec b) {
  if (target.bias) {
    a += load(target.bias + column);
    b += load(target.bias + column + kLanes);
  }
  Out* to = target.out + row * target.num_out + column;
  const int64_t left = target.num_out - column;
  store_first(to, a, left);
  if (left > kLanes) store_first(to + kLanes, b, left - kLanes);
}

// Rows [row, row + M) of one panel.
template <int M, class T, class Out>
void linear_tile(const float* rows, const T* panel, int64_t length, NextPanel next, const Target<Out>& target, int64_t row, int64_t column) {
  Vec total[M][2] = {};
  for (int64_t k = 0; k < length; k += kSumLength) {
    Vec acc[M][2] = {};
    accumulate<M, 1, M>(rows + k * M, panel + k * kPanel, kPanel, std::min(kSumLength, length - k), acc, &next);
    for (int r = 0; r < M; ++r)
      for (int half = 0; half < 2; ++half) total[r][half] += acc[r][half];
  }
  for (int r = 0; r < M; ++r) finish(target, row + r, column, total[r][0], total[r][1]);
}

template <class T, class Out>
void linear(const T* x, int64_t x_stride, int64_t num_rows, int64_t num_in, const T* packed, const Target<Out>& target, int threads) {
  const Tiles tiles(num_rows);
  const int64_t panels = (target.num_out + kPanel - 1) / kPanel, tile_floats = packed_floats(kMaxRows, num_in);
  const int64_t block = std::min(tiles.count, std::max<int64_t>(1, kBlockFloats / tile_floats));
  static thread_local Workspace workspace;
  float* const rows = workspace.floats(block * tile_floats);
  const auto pack = [&](int64_t first, int64_t t) {
    const T* from = x + tiles.begin(first + t) * x_stride;
    pack_rows([&](int64_t r) { return from + r * x_stride; }, tiles.size(first + t), num_in, rows + t * tile_floats);
  };
  const auto multiply = [&](int64_t first, int64_t count, int64_t p) {
    const T* panel = packed + p * num_in * kPanel;
    const int64_t panel_bytes = num_in * kPanel * (int64_t)sizeof(T);
    for (int64_t t = 0; t < count; ++t) {
      const NextPanel next{(const char*)panel + panel_bytes + t * panel_bytes / count, kPanel * (int64_t)sizeof(T) / count};
      with_rows(tiles.size(first + t), [&]<int M>() {
        linear_tile<M>(rows + t * tile_floats, panel, num_in, next, target, tiles.begin(first + t), p * kPanel);
      });
    }
  };
  const bool serial_pack = num_rows * num_in <= kSerialFloats;
  if (serial_pack)
    for (int64_t t = 0; t < tiles.count; ++t) pack(0, t);
  const int64_t chunk = std::max<int64_t>(1, panels / (8 * threads));
#pragma omp parallel num_threads(threads)
  for (int64_t first = 0; first < tiles.count; first += block) {
    const int64_t count = std::min(block, tiles.count - first);
    if (!serial_pack) {
#pragma omp for schedule(static)
      for (int64_t t = 0; t < count; ++t) pack(first, t);
    }
#pragma omp for schedule(dynamic, chunk)
    for (int64_t p = 0; p < panels; ++p) multiply(first, count, p);
  }
}

}  // namespace
}  // namespace rs

RS_EXPORT int64_t rs_panel_columns() { return rs::kPanel; }

RS_EXPORT void rs_pack_weight(int is_bf16, const void* weight, int64_t num_out, int64_t num_in, void* packed, int threads) {
  rs::with_type(is_bf16, [&]<class T>() { rs::pack_weight((const T*)weight, num_out, num_in, (T*)packed, threads); });
}

RS_EXPORT void rs_linear(int in_bf16, int out_bf16, const void* x, int64_t x_stride, int64_t num_rows, int64_t num_in, const void* packed,
                         const float* bias, int64_t num_out, void* out, int threads) {
  using namespace rs;
  if (!in_bf16)
    linear((const float*)x, x_stride, num_rows, num_in, (const float*)packed, Target<float>{(float*)out, bias, num_out}, threads);
  else if (out_bf16)
    linear((const bf16*)x, x_stride, num_rows, num_in, (const bf16*)packed, Target<bf16>{(bf16*)out, bias, num_out}, threads);
  else
    linear((const bf16*)x, x_stride, num_rows, num_in, (const bf16*)packed, Target<float>{(float*)out, bias, num_out}, threads);
}
