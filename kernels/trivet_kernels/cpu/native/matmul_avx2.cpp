// f32, bf16 and int8 products on 256-bit vectors, for processors without the 512-bit instructions of their format.
//
// As in matmul_avx512.cpp: a few rows by a panel (four vectors of 8 columns) stay in registers while k passes, and
// every output has one accumulator whatever the number of rows.
#include <immintrin.h>

#include <algorithm>

#include "matmul_kernels.h"

namespace trivet {
namespace {

constexpr int vectors = 4;
constexpr int64_t chunk_bytes = 256 << 10;        // activations that stay in the L2 while all panels pass by
constexpr int64_t stream_ahead = 2 * step_bytes;  // weights are asked for this far ahead where they are read once

constexpr int64_t part_steps = 10;  // of a panel: 20 KiB

// Bounded by the 16 registers.
template <WeightFormat format>
constexpr int max_rows = format == WeightFormat::f32 ? 3 : 2;

// One group (four bytes of k) of a row times 8 columns.
template <WeightFormat format>
__m256i dot(__m256i sums, __m256i row, __m256i weights) {
  if constexpr (format == WeightFormat::f32) {
    return _mm256_castps_si256(
        _mm256_fmadd_ps(_mm256_castsi256_ps(row), _mm256_castsi256_ps(weights), _mm256_castsi256_ps(sums)));
  } else if constexpr (format == WeightFormat::bf16) {
    // bf16 is the upper half of a float: the second of a pair needs a mask, the first a shift.
    const __m256i upper = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
    __m256 result = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_slli_epi32(row, 16)),
                                    _mm256_castsi256_ps(_mm256_slli_epi32(weights, 16)), _mm256_castsi256_ps(sums));
    result = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_and_si256(row, upper)),
                             _mm256_castsi256_ps(_mm256_and_si256(weights, upper)), result);
    return _mm256_castps_si256(result);
  } else {
    // Both sides lie in -127..127, so with the sign moved to one of them two products fit the saturating int16.
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(weights), _mm256_sign_epi8(row, weights));
    return _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  }
}

template <WeightFormat format>
const uint8_t* weights_at(const uint8_t* step, int group, int vector) {
  return format == WeightFormat::f32 ? step + group * 128 + vector * 32
                                     : step + vector / 2 * (step_bytes / 2) + group * line_bytes + vector % 2 * 32;
}

template <WeightFormat format>
void finish(const MatmulTask& task, const __m256i* sums, int64_t row, int64_t panel) {
  alignas(32) float values[panel_columns];
  const auto* scales = reinterpret_cast<const float*>(task.panel(panel) + task.weight.steps * step_bytes);
  for (int v = 0; v < vectors; ++v) {
    __m256 value = _mm256_castsi256_ps(sums[v]);
    if constexpr (format == WeightFormat::i8) {
      value = _mm256_mul_ps(_mm256_cvtepi32_ps(sums[v]), _mm256_loadu_ps(scales + v * 8));
      value = _mm256_mul_ps(value, _mm256_set1_ps(task.x.scales.as<float>()[row]));
    }
    _mm256_store_ps(values + v * 8, value);
  }
  float* out = task.out_at(row, panel);
  const int64_t columns = task.columns(panel);
  if (task.output == Output::add) {
    for (int64_t i = 0; i < columns; ++i) out[i] += values[i];
  } else {
    for (int64_t i = 0; i < columns; ++i) out[i] = values[i];
  }
}

// Some steps of k, and where the sums of the steps before lie when they are not the first.
struct Part {
  int64_t begin, end;
  int8_t* sums;  // [rows][32] of a chunk
  int64_t first_row;

  __m256i* sums_of(int64_t row) const {
    return reinterpret_cast<__m256i*>(sums + (row - first_row) * panel_columns * 4);
  }
};

// The first rows of a chunk `stream` the weights: they ask for them ahead.
template <WeightFormat format, int rows, bool stream>
void block(const MatmulTask& task, int64_t row, int64_t panel, const Part& part) {
  __m256i sums[rows][vectors];
  for (int r = 0; r < rows; ++r) {
    for (int v = 0; v < vectors; ++v) {
      sums[r][v] = part.begin == 0 ? _mm256_setzero_si256() : _mm256_load_si256(part.sums_of(row + r) + v);
    }
  }
  const uint8_t* x = task.x.line(row, part.begin);
  const uint8_t* weights = task.panel(panel) + part.begin * step_bytes;
  for (int64_t step = part.begin; step < part.end; ++step) {
    for (int group = 0; group < 16; ++group) {
      __m256i broadcast[rows];
#pragma GCC unroll 3
      for (int r = 0; r < rows; ++r) {
        int32_t four_bytes;
        __builtin_memcpy(&four_bytes, x + r * line_bytes + group * 4, 4);
        broadcast[r] = _mm256_set1_epi32(four_bytes);
      }
#pragma GCC unroll 4
      for (int v = 0; v < vectors; ++v) {
        const uint8_t* at = weights_at<format>(weights, group, v);
        const __m256i w = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
        if (stream && v % 2 == 0) _mm_prefetch(reinterpret_cast<const char*>(at + stream_ahead), _MM_HINT_T1);
#pragma GCC unroll 3
        for (int r = 0; r < rows; ++r) sums[r][v] = dot<format>(sums[r][v], broadcast[r], w);
      }
    }
    weights += step_bytes;
    x += row_block * line_bytes;
  }
  for (int r = 0; r < rows; ++r) {
    if (part.end == task.weight.steps) {
      finish<format>(task, sums[r], row + r, panel);
    } else {
      for (int v = 0; v < vectors; ++v) _mm256_store_si256(part.sums_of(row + r) + v, sums[r][v]);
    }
  }
}

template <WeightFormat format, bool stream>
void rows_of_block(const MatmulTask& task, int64_t row, int64_t rows, int64_t panel, const Part& part) {
  if (rows == 3) {
    block<format, max_rows<format>, stream>(task, row, panel, part);
  } else if (rows == 2) {
    block<format, 2, stream>(task, row, panel, part);
  } else {
    block<format, 1, stream>(task, row, panel, part);
  }
}

template <WeightFormat format>
void matmul_vectors(const MatmulTask& task) {
  const auto [row_begin, row_end, panel_begin, panel_end] = task.range;
  const int64_t steps = task.weight.steps;
  const int64_t chunk_rows = std::max<int64_t>(row_block, chunk_bytes / (steps * line_bytes) / 16 * 16);
  for (int64_t chunk = row_begin; chunk < row_end; chunk += chunk_rows) {
    const int64_t chunk_end = std::min(chunk + chunk_rows, row_end);
    // Many rows: a part of the panel that fits the L1 meets all of them before the next.
    const int64_t parts = chunk_end - chunk <= max_rows<format> ? 1 : (steps + part_steps - 1) / part_steps;
    int8_t* sums = parts == 1 ? nullptr : thread_scratch((chunk_end - chunk) * panel_columns * 4);
    for (int64_t panel = panel_begin; panel < panel_end; ++panel) {
      for (int64_t index = 0; index < parts; ++index) {
        const Part part{steps * index / parts, steps * (index + 1) / parts, sums, chunk};
        for (int64_t row = chunk; row < chunk_end;) {
          const int64_t block_end = std::min(row / row_block * row_block + row_block, chunk_end);
          const int64_t rows = std::min<int64_t>(max_rows<format>, block_end - row);
          if (row == chunk) {
            rows_of_block<format, true>(task, row, rows, panel, part);
          } else {
            rows_of_block<format, false>(task, row, rows, panel, part);
          }
          row += rows;
        }
      }
    }
  }
}

}  // namespace

void matmul_f32_avx2(const MatmulTask& task) { matmul_vectors<WeightFormat::f32>(task); }
void matmul_bf16_avx2(const MatmulTask& task) { matmul_vectors<WeightFormat::bf16>(task); }
void matmul_i8_avx2(const MatmulTask& task) { matmul_vectors<WeightFormat::i8>(task); }

}  // namespace trivet
