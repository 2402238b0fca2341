// Products with weights in GGUF blocks by AVX512-VNNI: the weights stay 4 (or 8) bits wide up to the registers.
#include <immintrin.h>

#include <algorithm>

#include "matmul_blocks.h"
#include "put_row_avx512.h"

namespace trivet {
namespace {

constexpr int64_t chunk_bytes = 640 << 10;  // activations that stay in the L2 while all panels pass by
constexpr int64_t stream_ahead = 4096;      // weights are asked for this far ahead where they are read once
constexpr int max_rows = 6;                 // 12 sums of integers and 12 of floats

struct Columns {
  __m512i low, high;  // of columns 0-15 and 16-31: four unsigned values of k each
};

template <WeightFormat format>
Columns weights_of(const uint8_t* block, int group) {
  const __m512i first = _mm512_loadu_si512(block + group * line_bytes);
  if constexpr (format == WeightFormat::q8_0) {
    // dpbusd takes unsigned weights: value + 128.
    const __m512i offset = _mm512_set1_epi8(static_cast<char>(0x80));
    const __m512i second = _mm512_loadu_si512(block + 512 + group * line_bytes);
    return {_mm512_xor_si512(first, offset), _mm512_xor_si512(second, offset)};
  } else {
    const __m512i nibble = _mm512_set1_epi8(15);
    return {_mm512_and_si512(first, nibble), _mm512_and_si512(_mm512_srli_epi16(first, 4), nibble)};
  }
}

// What the unsigned form of the weights adds to each of their values.
template <WeightFormat format>
constexpr int weight_offset = format == WeightFormat::q4_0 ? 8 : format == WeightFormat::q8_0 ? 128 : 0;

__m512 halves(const uint8_t* at) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
}

template <WeightFormat format, int rows>
void row_group(const MatmulTask& task, int64_t row, int64_t panel) {
  __m512 sums[rows][2];
  for (int r = 0; r < rows; ++r) sums[r][0] = sums[r][1] = _mm512_setzero_ps();
  const uint8_t* weights = task.panel(panel);
  const int64_t blocks = task.weight.k / block_values;
  const uint8_t* x = task.x.line(row, 0);
  const float* scales = task.x.scales.as<float>() + scale_index(task.x, row, 0);
  const int32_t* row_sums = task.x.sums.as<int32_t>() + scale_index(task.x, row, 0);
  for (int64_t block = 0; block < blocks; ++block) {
    if (rows <= 4) {
      for (int64_t line = 0; line < block_bytes(format); line += line_bytes) {
        _mm_prefetch(reinterpret_cast<const char*>(weights + stream_ahead + line), _MM_HINT_T1);
      }
    }
    __m512i dots[rows][2];
    for (int r = 0; r < rows; ++r) {
      dots[r][0] = dots[r][1] = _mm512_set1_epi32(-weight_offset<format> * row_sums[r]);
    }
#pragma GCC unroll 8
    for (int group = 0; group < line_groups; ++group) {
      const Columns columns = weights_of<format>(weights, group);
#pragma GCC unroll 6
      for (int r = 0; r < rows; ++r) {
        int32_t four_bytes;
        __builtin_memcpy(&four_bytes, x + r * line_bytes + group * 4, 4);
        const __m512i broadcast = _mm512_set1_epi32(four_bytes);
        dots[r][0] = _mm512_dpbusd_epi32(dots[r][0], columns.low, broadcast);
        dots[r][1] = _mm512_dpbusd_epi32(dots[r][1], columns.high, broadcast);
      }
    }
    const uint8_t* weight_scales = weights + values_bytes(format);
    for (int half = 0; half < 2; ++half) {
      const __m512 d = halves(weight_scales + half * 32);
      for (int r = 0; r < rows; ++r) {
        const __m512 scale = _mm512_mul_ps(d, _mm512_set1_ps(scales[r]));
        sums[r][half] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots[r][half]), scale, sums[r][half]);
        if constexpr (format == WeightFormat::q4_1) {
          const __m512 row_sum = _mm512_set1_ps(scales[r] * static_cast<float>(row_sums[r]));
          sums[r][half] = _mm512_fmadd_ps(halves(weight_scales + 64 + half * 32), row_sum, sums[r][half]);
        }
      }
    }
    weights += block_bytes(format);
    x += block % 2 == 0 ? 32 : row_block * line_bytes - 32;
    scales += row_block;
    row_sums += row_block;
  }
  for (int r = 0; r < rows; ++r) put_row(task, sums[r][0], sums[r][1], row + r, panel);
}

template <WeightFormat format>
void rows_of_block(const MatmulTask& task, int64_t row, int64_t rows, int64_t panel) {
  switch (rows) {
    case 1: return row_group<format, 1>(task, row, panel);
    case 2: return row_group<format, 2>(task, row, panel);
    case 3: return row_group<format, 3>(task, row, panel);
    case 4: return row_group<format, 4>(task, row, panel);
    case 5: return row_group<format, 5>(task, row, panel);
    default: return row_group<format, max_rows>(task, row, panel);
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
  switch (task.weight.format) {
    case WeightFormat::q4_0: return matmul_format<WeightFormat::q4_0>(task);
    case WeightFormat::q4_1: return matmul_format<WeightFormat::q4_1>(task);
    default: return matmul_format<WeightFormat::q8_0>(task);
  }
}

}  // namespace trivet
