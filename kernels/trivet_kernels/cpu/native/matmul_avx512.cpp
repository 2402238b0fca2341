// f32, bf16 and int8 products on 512-bit vectors: FMA, AVX512-BF16 (dpbf16ps) and AVX512-VNNI (dpbusd).
//
// One shape for the three: a block of rows by one or two panels stays in registers while k passes; each step
// broadcasts four bytes of a row (one float, a bf16 pair or four int8) and multiplies them with 16 columns. Every
// output has one accumulator whatever the block, so the bits do not depend on how the rows are cut into blocks.
#include <immintrin.h>

#include <algorithm>

#include "matmul_kernels.h"
#include "put_row_avx512.h"

namespace trivet {
namespace {

constexpr int64_t chunk_bytes = 640 << 10;         // activations that stay in the L2 while all panels pass by
constexpr int64_t stream_ahead = 2 * step_bytes;   // weights are asked for this far ahead
constexpr int max_rows = 8;                        // by two vectors of columns: 16 accumulators hide the latency

template <WeightFormat format>
__m512i dot(__m512i sums, __m512i row, __m512i weights) {
  if constexpr (format == WeightFormat::f32) {
    return _mm512_castps_si512(
        _mm512_fmadd_ps(_mm512_castsi512_ps(row), _mm512_castsi512_ps(weights), _mm512_castsi512_ps(sums)));
  } else if constexpr (format == WeightFormat::bf16) {
    return _mm512_castps_si512(
        _mm512_dpbf16_ps(_mm512_castsi512_ps(sums), (__m512bh)row, (__m512bh)weights));
  } else {
    return _mm512_dpbusd_epi32(sums, row, weights);
  }
}

// Vector `half` of group `group` (four bytes of k) in one step of a panel.
template <WeightFormat format>
const uint8_t* weights_at(const uint8_t* step, int group, int half) {
  return format == WeightFormat::f32 ? step + group * 128 + half * 64 : step + half * (step_bytes / 2) + group * 64;
}

template <WeightFormat format>
__m512 finished(const MatmulTask& task, __m512i sums, int64_t row, int64_t panel, int half) {
  if constexpr (format == WeightFormat::i8) {
    const uint8_t* tail = task.panel(panel) + task.weight.steps * step_bytes + half * 64;
    // The rows are stored as value + 128, because dpbusd takes one unsigned side.
    const __m512i excess = _mm512_slli_epi32(_mm512_loadu_si512(tail + panel_columns * 4), 7);
    const __m512 value = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_sub_epi32(sums, excess)), _mm512_loadu_ps(tail));
    return _mm512_mul_ps(value, _mm512_set1_ps(task.x.scales.as<float>()[row]));
  } else {
    return _mm512_castsi512_ps(sums);
  }
}

// The 32 columns of one row.
template <WeightFormat format>
void finish(const MatmulTask& task, __m512i low_sums, __m512i high_sums, int64_t row, int64_t panel) {
  const __m512 low = finished<format>(task, low_sums, row, panel, 0);
  const __m512 high = finished<format>(task, high_sums, row, panel, 1);
  put_row(task, low, high, row, panel);
}

// `rows` rows of one block of 16 by `panels` panels that follow each other. The first rows of a chunk `stream` the
// weights: they ask for them ahead; for the others that would only take load slots.
template <WeightFormat format, int rows, int panels, bool stream>
void block(const MatmulTask& task, int64_t row, int64_t panel) {
  constexpr int vectors = 2 * panels;
  __m512i sums[rows][vectors];
  for (int r = 0; r < rows; ++r) {
    for (int v = 0; v < vectors; ++v) sums[r][v] = _mm512_setzero_si512();
  }
  const uint8_t* x = task.x.line(row, 0);
  const uint8_t* weights = task.panel(panel);
  const int64_t panel_bytes = task.weight.panel_bytes;
  for (int64_t step = 0; step < task.weight.steps; ++step) {
#pragma GCC unroll 2
    for (int group = 0; group < 16; ++group) {
      __m512i w[vectors];
#pragma GCC unroll 4
      for (int v = 0; v < vectors; ++v) {
        const uint8_t* at = weights_at<format>(weights + v / 2 * panel_bytes, group, v % 2);
        w[v] = _mm512_loadu_si512(at);
        if (stream) _mm_prefetch(reinterpret_cast<const char*>(at + stream_ahead), _MM_HINT_T1);
      }
#pragma GCC unroll 8
      for (int r = 0; r < rows; ++r) {
        int32_t four_bytes;
        __builtin_memcpy(&four_bytes, x + r * line_bytes + group * 4, 4);
        const __m512i broadcast = _mm512_set1_epi32(four_bytes);
#pragma GCC unroll 4
        for (int v = 0; v < vectors; ++v) sums[r][v] = dot<format>(sums[r][v], broadcast, w[v]);
      }
    }
    weights += step_bytes;
    x += row_block * line_bytes;
  }
  for (int r = 0; r < rows; ++r) {
    for (int p = 0; p < panels; ++p) finish<format>(task, sums[r][2 * p], sums[r][2 * p + 1], row + r, panel + p);
  }
}

template <WeightFormat format, int panels, bool stream>
void rows_of_block(const MatmulTask& task, int64_t row, int64_t rows, int64_t panel) {
  switch (rows) {
    case 1: return block<format, 1, panels, stream>(task, row, panel);
    case 2: return block<format, 2, panels, stream>(task, row, panel);
    case 3: return block<format, 3, panels, stream>(task, row, panel);
    case 4: return block<format, 4, panels, stream>(task, row, panel);
    case 5: return block<format, 5, 1, stream>(task, row, panel);
    case 6: return block<format, 6, 1, stream>(task, row, panel);
    case 7: return block<format, 7, 1, stream>(task, row, panel);
    default: return block<format, max_rows, 1, stream>(task, row, panel);
  }
}

template <WeightFormat format>
void matmul_vectors(const MatmulTask& task) {
  const auto [row_begin, row_end, panel_begin, panel_end] = task.range;
  const int64_t chunk_rows = std::max<int64_t>(row_block, chunk_bytes / (task.weight.steps * line_bytes) / 16 * 16);
  for (int64_t chunk = row_begin; chunk < row_end; chunk += chunk_rows) {
    const int64_t chunk_end = std::min(chunk + chunk_rows, row_end);
    // Few rows: two panels at once, for enough sums in flight and two streams of weights.
    const int64_t stride = chunk_end - chunk <= 4 ? 2 : 1;
    int64_t panel = panel_begin;
    for (; stride == 2 && panel + 2 <= panel_end; panel += 2) {
      rows_of_block<format, 2, true>(task, chunk, chunk_end - chunk, panel);
    }
    for (; panel < panel_end; ++panel) {
      for (int64_t row = chunk; row < chunk_end; row += row_block) {
        const int64_t rows = std::min(row_block, chunk_end - row);
        const int64_t first = rows <= max_rows ? rows : (rows + 1) / 2;
        if (row == chunk) {
          rows_of_block<format, 1, true>(task, row, first, panel);
        } else {
          rows_of_block<format, 1, false>(task, row, first, panel);
        }
        if (rows > first) rows_of_block<format, 1, false>(task, row + first, rows - first, panel);
      }
    }
  }
}

}  // namespace

void matmul_f32_avx512(const MatmulTask& task) { matmul_vectors<WeightFormat::f32>(task); }
void matmul_bf16_avx512(const MatmulTask& task) { matmul_vectors<WeightFormat::bf16>(task); }
void matmul_i8_avx512(const MatmulTask& task) { matmul_vectors<WeightFormat::i8>(task); }

}  // namespace trivet
