// Conversion of activations to bf16 and int8 lines, and to those of block formats, on 512-bit vectors.
#include <immintrin.h>

#include <algorithm>

#include "matmul_blocks.h"
#include "quantise.h"

namespace trivet {
namespace {

__mmask16 first(int64_t count) { return count >= 16 ? 0xffff : count <= 0 ? 0 : (1u << count) - 1; }

uint32_t largest_bits(const float* values, int64_t count) {
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
  __m512i largest = _mm512_setzero_si512();
  for (int64_t i = 0; i < count; i += 16) {
    const __m512i bits = _mm512_maskz_loadu_epi32(first(count - i), values + i);
    largest = _mm512_max_epu32(largest, _mm512_and_si512(bits, magnitude));
  }
  return _mm512_reduce_max_epu32(largest);
}

__m512i quantised(const float* values, int64_t count, const QuantisationScale& scale) {
  const __m512 value = _mm512_maskz_loadu_ps(first(count), values);
  if (scale.inverse == 0.0f) return _mm512_setzero_si512();
  return _mm512_cvtps_epi32(_mm512_mul_ps(value, _mm512_set1_ps(scale.inverse)));
}

// Columns [begin, end) of a row; `from` points at the first of them.
void prepare_bf16_row(Activations& into, const float* from, int64_t row, int64_t begin, int64_t end) {
  for (int64_t column = begin; column < end; column += 32, from += 32) {
    const __m512 low = _mm512_maskz_loadu_ps(first(end - column), from);
    const __m512 high = _mm512_maskz_loadu_ps(first(end - column - 16), from + 16);
    _mm512_storeu_si512(into.line(row, column / 32), (__m512i)_mm512_cvtne2ps_pbh(high, low));
  }
}

void prepare_i8(Activations& into, const float* x, int64_t ldx, int64_t row_begin, int64_t row_end, int offset) {
  for (int64_t row = row_begin; row < row_end; ++row) {
    const float* from = x + row * ldx;
    const QuantisationScale scale = scale_for(largest_bits(from, into.k));
    into.scales.as<float>()[row] = scale.scale;
    for (int64_t step = 0; step < into.steps; ++step) {
      uint8_t* to = into.line(row, step);
      for (int64_t i = 0; i < 64; i += 16) {
        const int64_t column = step * 64 + i;
        const __m512i values = quantised(from + column, into.k - column, scale);
        const __m128i bytes = _mm512_cvtepi32_epi8(_mm512_add_epi32(values, _mm512_set1_epi32(offset)));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), bytes);
      }
    }
  }
}

}  // namespace

void prepare_bf16_avx512(Activations& into, const float* x, int64_t ldx, int64_t row_begin, int64_t row_end) {
  for (int64_t row = row_begin; row < row_end; ++row) prepare_bf16_row(into, x + row * ldx, row, 0, into.k);
}

void prepare_bf16_columns_avx512(Activations& into, const float* x, int64_t ldx, const ColumnRange& range) {
  const int64_t step = range.column_begin / 32, width = range.column_end - range.column_begin;
  for (int64_t row = range.row_begin; row < range.row_end; ++row) {
    const float* from = x + row * ldx;
    if (width > 16) {
      prepare_bf16_row(into, from, row, range.column_begin, range.column_end);
      continue;
    }
    // Half a line, of which another may be writing the other half.
    const __m512 values = width == 16 ? _mm512_loadu_ps(from) : _mm512_maskz_loadu_ps(first(width), from);
    uint8_t* to = into.line(row, step) + range.column_begin % 32 * 2;
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), (__m256i)_mm512_cvtneps_pbh(values));
  }
}

void prepare_i8_avx512(Activations& into, const float* x, int64_t ldx, int64_t row_begin, int64_t row_end) {
  prepare_i8(into, x, ldx, row_begin, row_end, 128);
}

void prepare_i8_amx(Activations& into, const float* x, int64_t ldx, int64_t row_begin, int64_t row_end) {
  prepare_i8(into, x, ldx, row_begin, row_end, 0);
}

namespace {

// Rows and blocks of activations; x points at row 0 of the first block.
struct BlockRange {
  int64_t row_begin, row_end, block_begin, block_end;
};

void prepare_range(Activations& into, const float* x, int64_t ldx, const BlockRange& range) {
  const __m512i half_step = _mm512_set1_epi32(8);
  for (int64_t row = range.row_begin; row < range.row_end; ++row) {
    for (int64_t block = range.block_begin; block < range.block_end; ++block) {
      const float* from = x + row * ldx + (block - range.block_begin) * block_values;
      uint8_t* to = into.line(row, block);
      const QuantisationScale scale = scale_for(largest_bits(from, block_values), block_levels);
      __m512i sum = _mm512_setzero_si512();
      for (int64_t i = 0; i < block_values; i += 16) {
        const __m512i values = quantised(from + i, 16, scale);
        const __m512i upper = _mm512_srai_epi32(_mm512_add_epi32(values, half_step), 4);
        const __m512i lower = _mm512_sub_epi32(values, _mm512_slli_epi32(upper, 4));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), _mm512_cvtepi32_epi8(upper));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 32 + i), _mm512_cvtepi32_epi8(lower));
        sum = _mm512_add_epi32(sum, values);
      }
      const int64_t place = scale_index(into, row, block);
      into.scales.as<float>()[place] = scale.scale;
      into.sums.as<int32_t>()[place] = _mm512_reduce_add_epi32(sum);
    }
  }
}

}  // namespace

void prepare_blocks_avx512(Activations& into, const float* x, int64_t ldx, int64_t row_begin, int64_t row_end) {
  prepare_range(into, x, ldx, {row_begin, row_end, 0, into.steps});
}

void prepare_blocks_columns_avx512(Activations& into, const float* x, int64_t ldx, const ColumnRange& range) {
  prepare_range(into, x, ldx,
                {range.row_begin, range.row_end, range.column_begin / block_values, range.column_end / block_values});
}

}  // namespace trivet
