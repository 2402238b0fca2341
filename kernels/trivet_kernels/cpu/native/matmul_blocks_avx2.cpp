// Products with weights in GGUF blocks on 256-bit vectors: the floats of matmul_blocks_avx512.cpp in the same order, with
// the integer products by maddubs.
#include <immintrin.h>

#include <algorithm>

#include "matmul_blocks.h"

namespace trivet {
namespace {

constexpr int vectors = 4;                  // of 8 columns
constexpr int max_rows = 2;                 // bounded by the 16 registers
constexpr int64_t chunk_bytes = 256 << 10;  // activations that stay in the L2 while all panels pass by
constexpr int64_t stream_ahead = 4096;      // weights are asked for this far ahead where they are read once

__m256i load(const uint8_t* at) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)); }

__m256i broadcast(const uint8_t* at) {
  int32_t four_bytes;
  __builtin_memcpy(&four_bytes, at, 4);
  return _mm256_set1_epi32(four_bytes);
}

// Dot products of one block of a row with 32 columns. Nibbles: a pair of products is at most 2 * 15 * 127, so eight
// groups add up in int16. Bytes: with the sign moved to the activation a pair is at most 2 * 128 * 127, which fits.
template <WeightFormat format, int rows>
void dots_of(const uint8_t* weights, const uint8_t* x, const int32_t* row_sums, __m256i (*dots)[vectors]) {
  const __m256i ones = _mm256_set1_epi16(1), nibble = _mm256_set1_epi8(15);
  for (int r = 0; r < rows; ++r) {
    for (int v = 0; v < vectors; ++v) dots[r][v] = _mm256_setzero_si256();
  }
  for (int group = 0; group < line_groups; ++group) {
#pragma GCC unroll 2
    for (int r = 0; r < rows; ++r) {
      const __m256i row = broadcast(x + r * line_bytes + group * 4);
      const uint8_t* line = weights + group * line_bytes;
#pragma GCC unroll 4
      for (int v = 0; v < vectors; ++v) {
        if constexpr (format == WeightFormat::q8_0) {
          const __m256i w = load(line + v / 2 * 512 + v % 2 * 32);
          const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(row, w));
          dots[r][v] = _mm256_add_epi32(dots[r][v], _mm256_madd_epi16(pairs, ones));
        } else {
          const __m256i packed = load(line + v % 2 * 32);
          const __m256i w = _mm256_and_si256(v < 2 ? packed : _mm256_srli_epi16(packed, 4), nibble);
          dots[r][v] = _mm256_add_epi16(dots[r][v], _mm256_maddubs_epi16(w, row));
        }
      }
    }
  }
  if constexpr (format != WeightFormat::q8_0) {
    for (int r = 0; r < rows; ++r) {
      const __m256i excess = _mm256_set1_epi32(format == WeightFormat::q4_0 ? 8 * row_sums[r] : 0);
      for (int v = 0; v < vectors; ++v) dots[r][v] = _mm256_sub_epi32(_mm256_madd_epi16(dots[r][v], ones), excess);
    }
  }
}

__m256 halves(const uint8_t* at) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at))); }

void put(const MatmulTask& task, const __m256* sums, int64_t row, int64_t panel) {
  alignas(32) float values[panel_columns];
  for (int v = 0; v < vectors; ++v) _mm256_store_ps(values + v * 8, sums[v]);
  float* out = task.out_at(row, panel);
  const int64_t columns = task.columns(panel);
  for (int64_t i = 0; i < columns; ++i) out[i] = task.output == Output::add ? out[i] + values[i] : values[i];
}

template <WeightFormat format, int rows>
void row_group(const MatmulTask& task, int64_t row, int64_t panel) {
  __m256 sums[rows][vectors];
  for (int r = 0; r < rows; ++r) {
    for (int v = 0; v < vectors; ++v) sums[r][v] = _mm256_setzero_ps();
  }
  const uint8_t* weights = task.panel(panel);
  const uint8_t* x = task.x.line(row, 0);
  const float* scales = task.x.scales.as<float>() + scale_index(task.x, row, 0);
  const int32_t* row_sums = task.x.sums.as<int32_t>() + scale_index(task.x, row, 0);
  for (int64_t block = 0; block < task.weight.k / block_values; ++block) {
    for (int64_t line = 0; line < block_bytes(format); line += line_bytes) {
      _mm_prefetch(reinterpret_cast<const char*>(weights + stream_ahead + line), _MM_HINT_T1);
    }
    __m256i dots[rows][vectors];
    dots_of<format, rows>(weights, x, row_sums, dots);
    const uint8_t* weight_scales = weights + values_bytes(format);
    for (int r = 0; r < rows; ++r) {
      const __m256 scale = _mm256_set1_ps(scales[r]);
      const __m256 row_sum = _mm256_set1_ps(scales[r] * static_cast<float>(row_sums[r]));
      for (int v = 0; v < vectors; ++v) {
        const __m256 d = halves(weight_scales + v * 16);
        sums[r][v] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dots[r][v]), _mm256_mul_ps(d, scale), sums[r][v]);
        if constexpr (format == WeightFormat::q4_1) {
          sums[r][v] = _mm256_fmadd_ps(halves(weight_scales + 64 + v * 16), row_sum, sums[r][v]);
        }
      }
    }
    weights += block_bytes(format);
    x += block % 2 == 0 ? 32 : row_block * line_bytes - 32;
    scales += row_block;
    row_sums += row_block;
  }
  for (int r = 0; r < rows; ++r) put(task, sums[r], row + r, panel);
}

template <WeightFormat format>
void matmul_format(const MatmulTask& task) {
  const auto [row_begin, row_end, panel_begin, panel_end] = task.range;
  const int64_t chunk_rows = std::max<int64_t>(row_block, chunk_bytes / (task.x.steps * line_bytes) / 16 * 16);
  for (int64_t chunk = row_begin; chunk < row_end; chunk += chunk_rows) {
    const int64_t chunk_end = std::min(chunk + chunk_rows, row_end);
    for (int64_t panel = panel_begin; panel < panel_end; ++panel) {
      int64_t row = chunk;  // a multiple of 16, so two rows never straddle blocks of rows
      for (; row + max_rows <= chunk_end; row += max_rows) row_group<format, max_rows>(task, row, panel);
      for (; row < chunk_end; ++row) row_group<format, 1>(task, row, panel);
    }
  }
}

}  // namespace

void matmul_blocks_avx2(const MatmulTask& task) {
  switch (task.weight.format) {
    case WeightFormat::q4_0: return matmul_format<WeightFormat::q4_0>(task);
    case WeightFormat::q4_1: return matmul_format<WeightFormat::q4_1>(task);
    default: return matmul_format<WeightFormat::q8_0>(task);
  }
}

}  // namespace trivet
