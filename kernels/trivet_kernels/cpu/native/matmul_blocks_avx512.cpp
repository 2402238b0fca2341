// Products with weights in blocks by AVX512-VNNI: the weights stay 4 (or 8) bits wide up to the registers.
#include <immintrin.h>

#include <algorithm>

#include "block_scales_avx512.h"
#include "put_row_avx512.h"

namespace trivet {
namespace {

constexpr int64_t chunk_bytes = 640 << 10;  // activations that stay in the L2 while all panels pass by
constexpr int64_t stream_ahead = 4096;      // weights are asked for this far ahead where they are read once
constexpr int max_rows = 4;                 // 16 sums of integers and 8 of floats

struct Columns {
  __m512i low, high;  // of columns 0-15 and 16-31: four unsigned values of k each
};

template <WeightFormat format>
[[gnu::always_inline]] inline Columns weights_of(const uint8_t* block, int group) {
  const __m512i first = _mm512_loadu_si512(block + group * line_bytes);
  if constexpr (has_nibbles(format)) {
    const __m512i nibble = _mm512_set1_epi8(15);
    return {_mm512_and_si512(first, nibble), _mm512_and_si512(_mm512_srli_epi16(first, 4), nibble)};
  } else {
    // dpbusd takes unsigned weights: value + 128.
    const __m512i offset = _mm512_set1_epi8(static_cast<char>(0x80));
    const __m512i second = _mm512_loadu_si512(block + 512 + group * line_bytes);
    return {_mm512_xor_si512(first, offset), _mm512_xor_si512(second, offset)};
  }
}

// What the unsigned form of the weights adds to each of their values.
template <WeightFormat format>
constexpr int weight_offset = has_nibbles(format) ? stored_offset(format) : 128;

[[gnu::always_inline]] inline __m512i broadcast(const uint8_t* at) {
  int32_t four_bytes;
  __builtin_memcpy(&four_bytes, at, 4);
  return _mm512_set1_epi32(four_bytes);
}

// The sum of the integers of a part of a row's block.
template <WeightFormat format>
[[gnu::always_inline]] inline int32_t part_sum(const uint8_t* x, int32_t block_sum, int part) {
  if constexpr (scale_values(format) == block_values) {
    return block_sum;
  } else {
    int32_t sum = 0;
    for (int i = 0; i < 16; ++i) {
      sum += 16 * static_cast<int8_t>(x[part * 16 + i]) + static_cast<int8_t>(x[32 + part * 16 + i]);
    }
    return sum;
  }
}

template <WeightFormat format, int rows>
void row_group(const MatmulTask& task, int64_t row, int64_t panel) {
  constexpr int parts = block_values / scale_values(format), groups = line_groups / parts;
  __m512 sums[rows][2];
  for (int r = 0; r < rows; ++r) sums[r][0] = sums[r][1] = _mm512_setzero_ps();
  BlockWalk<format> walk(task.panel(panel));
  const uint8_t* x = task.x.line(row, 0);
  const float* scales = task.x.scales.as<float>() + scale_index(task.x, row, 0);
  const int32_t* row_sums = task.x.sums.as<int32_t>() + scale_index(task.x, row, 0);
  for (int64_t block = 0; block < task.x.steps; ++block, walk.next()) {
    for (int64_t line = 0; line < block_bytes(format); line += line_bytes) {
      _mm_prefetch(reinterpret_cast<const char*>(walk.block + stream_ahead + line), _MM_HINT_T1);
    }
    for (int part = 0; part < parts; ++part) {
      __m512i upper[rows][2], lower[rows][2];
      for (int r = 0; r < rows; ++r) {
        upper[r][0] = upper[r][1] = _mm512_setzero_si512();
        const int32_t sum = part_sum<format>(x + r * line_bytes, row_sums[r], part);
        lower[r][0] = lower[r][1] = _mm512_set1_epi32(-weight_offset<format> * sum);
      }
#pragma GCC unroll 8
      for (int group = part * groups; group < part * groups + groups; ++group) {
        const Columns columns = weights_of<format>(walk.block, group);
#pragma GCC unroll 4
        for (int r = 0; r < rows; ++r) {
          const __m512i first = broadcast(x + r * line_bytes + group * 4);
          upper[r][0] = _mm512_dpbusd_epi32(upper[r][0], columns.low, first);
          upper[r][1] = _mm512_dpbusd_epi32(upper[r][1], columns.high, first);
          const __m512i second = broadcast(x + r * line_bytes + 32 + group * 4);
          lower[r][0] = _mm512_dpbusd_epi32(lower[r][0], columns.low, second);
          lower[r][1] = _mm512_dpbusd_epi32(lower[r][1], columns.high, second);
        }
      }
      for (int half = 0; half < 2; ++half) {
        const __m512 d = scales_of(walk, half, part);
        for (int r = 0; r < rows; ++r) {
          const __m512i dot = _mm512_add_epi32(_mm512_slli_epi32(upper[r][half], 4), lower[r][half]);
          const __m512 scale = _mm512_mul_ps(d, _mm512_set1_ps(scales[r]));
          sums[r][half] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), scale, sums[r][half]);
        }
      }
    }
    if constexpr (has_minimum(format)) {
      for (int half = 0; half < 2; ++half) {
        const __m512 m = minimums_of(walk, half);
        for (int r = 0; r < rows; ++r) {
          const __m512 row_sum = _mm512_set1_ps(scales[r] * static_cast<float>(row_sums[r]));
          sums[r][half] = _mm512_fmadd_ps(m, row_sum, sums[r][half]);
        }
      }
    }
    x += row_block * line_bytes;
    scales += row_block;
    row_sums += row_block;
  }
  for (int r = 0; r < rows; ++r) put_row(task, sums[r][0], sums[r][1], row + r, panel);
}

template <WeightFormat format>
void rows_of_block(const MatmulTask& task, int64_t row, int64_t rows, int64_t panel) {
  switch (rows) {
    case 1:
      return row_group<format, 1>(task, row, panel);
    case 2:
      return row_group<format, 2>(task, row, panel);
    case 3:
      return row_group<format, 3>(task, row, panel);
    default:
      return row_group<format, max_rows>(task, row, panel);
  }
}

template <WeightFormat format>
void matmul_format(const MatmulTask& task) {
  const auto [row_begin, row_end, panel_begin, panel_end] = task.range;
  const int64_t chunk_rows = std::max<int64_t>(row_block, chunk_bytes / (task.x.steps * line_bytes) / 16 * 16);
  for (int64_t chunk = row_begin; chunk < row_end; chunk += chunk_rows) {
    const int64_t chunk_end = std::min(chunk + chunk_rows, row_end);
    for (int64_t panel = panel_begin; panel < panel_end; ++panel) {
      for (int64_t row = chunk; row < chunk_end;) {
        // The rows left of this block of 16 in equal groups.
        const int64_t left = std::min(row / row_block * row_block + row_block, chunk_end) - row;
        const int64_t groups = (left + max_rows - 1) / max_rows, rows = (left + groups - 1) / groups;
        rows_of_block<format>(task, row, rows, panel);
        row += rows;
      }
    }
  }
}

}  // namespace

void matmul_blocks_avx512(const MatmulTask& task) {
  with_block_format(task.weight.format, [&](auto format) { matmul_format<decltype(format)::value>(task); });
}

}  // namespace trivet
