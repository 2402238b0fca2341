// Products with weights in GGUF blocks on 256-bit vectors: the floats of matmul_blocks_avx512.cpp in the same order,
// with the integer products by maddubs.
#include <immintrin.h>

#include <algorithm>

#include "matmul_blocks.h"
#include "quantise.h"

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

// Dot products of values [first_group * 4, ...) of a block of a row with 32 columns.
template <WeightFormat format, int rows>
[[gnu::always_inline]] inline void dots_of(const uint8_t* weights, const uint8_t* x, int first_group, int groups,
                                           __m256i (*dots)[vectors]) {
  const __m256i nibble = _mm256_set1_epi16(15);
  for (int group = first_group; group < first_group + groups; ++group) {
    const uint8_t* line = weights + group * line_bytes;
#pragma GCC unroll 2
    for (int pair = 0; pair < 2; ++pair) {
      __m256i values[rows];
#pragma GCC unroll 2
      for (int r = 0; r < rows; ++r) values[r] = broadcast(x + r * line_bytes + group * 8 + pair * 4);
#pragma GCC unroll 4
      for (int v = 0; v < vectors; ++v) {
        __m256i w;
        if constexpr (has_nibbles(format)) {
          const __m256i packed = load(line + v % 2 * 32);
          const int shift = pair * 8 + v / 2 * 4;
          w = _mm256_srli_epi16(packed, shift);
          if (shift < 12) w = _mm256_and_si256(w, nibble);
        } else {
          w = load(line + v / 2 * 512 + v % 2 * 32);
          w = _mm256_srai_epi16(pair == 0 ? _mm256_slli_epi16(w, 8) : w, 8);
        }
#pragma GCC unroll 2
        for (int r = 0; r < rows; ++r) dots[r][v] = _mm256_add_epi32(dots[r][v], _mm256_madd_epi16(w, values[r]));
      }
    }
  }
}

__m256 halves(const uint8_t* at) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at))); }
__m256 unsigned_bytes(const uint8_t* at) {
  return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at))));
}
__m256 signed_bytes(const uint8_t* at) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at))));
}

// Scales of columns 8 * v .. 8 * v + 7 for values [16 * part, ...) of a block.
template <WeightFormat format>
__m256 scales_of(const BlockWalk<format>& walk, int v, int part) {
  if constexpr (format == WeightFormat::q6_k) {
    return _mm256_mul_ps(halves(walk.header + v * 16), signed_bytes(walk.scales() + part * 32 + v * 8));
  } else if constexpr (has_header(format)) {
    return _mm256_mul_ps(halves(walk.header + v * 16), unsigned_bytes(walk.scales() + v * 8));
  } else {
    return halves(walk.scales() + v * 16);
  }
}

template <WeightFormat format>
__m256 minimums_of(const BlockWalk<format>& walk, int v) {
  if constexpr (has_header(format)) {
    const __m256 negative = _mm256_sub_ps(_mm256_setzero_ps(), halves(walk.header + 64 + v * 16));
    return _mm256_mul_ps(negative, unsigned_bytes(walk.scales() + 32 + v * 8));
  } else {
    return halves(walk.scales() + 64 + v * 16);
  }
}

void put(const MatmulTask& task, const __m256* sums, int64_t row, int64_t panel) {
  alignas(32) float values[panel_columns];
  for (int v = 0; v < vectors; ++v) _mm256_store_ps(values + v * 8, sums[v]);
  float* out = task.out_at(row, panel);
  const int64_t columns = task.columns(panel);
  for (int64_t i = 0; i < columns; ++i) out[i] = task.output == Output::add ? out[i] + values[i] : values[i];
}

template <WeightFormat format, int rows>
void row_group(const MatmulTask& task, int64_t row, int64_t panel) {
  constexpr int parts = block_values / scale_values(format), groups = line_groups / parts;
  __m256 sums[rows][vectors];
  for (int r = 0; r < rows; ++r) {
    for (int v = 0; v < vectors; ++v) sums[r][v] = _mm256_setzero_ps();
  }
  BlockWalk<format> walk(task.panel(panel));
  const uint8_t* x = task.x.line(row, 0);
  const float* scales = task.x.scales.as<float>() + scale_index(task.x, row, 0);
  const int32_t* row_sums = task.x.sums.as<int32_t>() + scale_index(task.x, row, 0);
  for (int64_t block = 0; block < task.x.steps; ++block, walk.next()) {
    for (int64_t line = 0; line < block_bytes(format); line += line_bytes) {
      _mm_prefetch(reinterpret_cast<const char*>(walk.block + stream_ahead + line), _MM_HINT_T1);
    }
    for (int part = 0; part < parts; ++part) {
      __m256i dots[rows][vectors];
      for (int r = 0; r < rows; ++r) {
        const __m256i excess = _mm256_set1_epi32(-stored_offset(format) * row_sums[r]);
        for (int v = 0; v < vectors; ++v) dots[r][v] = excess;
      }
      dots_of<format, rows>(walk.block, x, part * groups, groups, dots);
      for (int v = 0; v < vectors; ++v) {
        const __m256 d = scales_of(walk, v, part);
        for (int r = 0; r < rows; ++r) {
          const __m256 scale = _mm256_mul_ps(d, _mm256_set1_ps(scales[r]));
          sums[r][v] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dots[r][v]), scale, sums[r][v]);
        }
      }
    }
    if constexpr (has_minimum(format)) {
      for (int v = 0; v < vectors; ++v) {
        const __m256 m = minimums_of(walk, v);
        for (int r = 0; r < rows; ++r) {
          const __m256 row_sum = _mm256_set1_ps(scales[r] * static_cast<float>(row_sums[r]));
          sums[r][v] = _mm256_fmadd_ps(m, row_sum, sums[r][v]);
        }
      }
    }
    x += row_block * line_bytes;
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
  with_block_format(task.weight.format, [&](auto format) { matmul_format<decltype(format)::value>(task); });
}

namespace {

// Rows and blocks of activations; x points at row 0 of the first block.
struct BlockRange {
  int64_t row_begin, row_end, block_begin, block_end;
};

void prepare_range(Activations& into, const float* x, int64_t ldx, const BlockRange& range) {
  for (int64_t row = range.row_begin; row < range.row_end; ++row) {
    for (int64_t block = range.block_begin; block < range.block_end; ++block) {
      const float* from = x + row * ldx + (block - range.block_begin) * block_values;
      const QuantisationScale scale = scale_for(largest_magnitude_bits(from, block_values), block_levels);
      const __m256 inverse = _mm256_set1_ps(scale.inverse);
      __m256i values[4];
      __m256i sum = _mm256_setzero_si256();
      for (int i = 0; i < 4; ++i) {
        const __m256i rounded = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(from + i * 8), inverse));
        values[i] = scale.inverse == 0.0f ? _mm256_setzero_si256() : rounded;
        sum = _mm256_add_epi32(sum, values[i]);
      }
      uint8_t* to = into.line(row, block);
      for (int half = 0; half < 2; ++half) {
        const __m256i words =
            _mm256_permute4x64_epi64(_mm256_packs_epi32(values[2 * half], values[2 * half + 1]), 0xd8);
        const __m256i pairs = _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(words, 0xd8), 0xd8);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + half * 32), pairs);
      }
      alignas(32) int32_t lanes[8];
      _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), sum);
      const int64_t place = scale_index(into, row, block);
      into.scales.as<float>()[place] = scale.scale;
      into.sums.as<int32_t>()[place] =
          (lanes[0] + lanes[1] + lanes[2] + lanes[3]) + (lanes[4] + lanes[5] + lanes[6] + lanes[7]);
    }
  }
}

}  // namespace

void prepare_blocks_avx2(Activations& into, const float* x, int64_t ldx, int64_t row_begin, int64_t row_end) {
  prepare_range(into, x, ldx, {row_begin, row_end, 0, into.steps});
}

void prepare_blocks_columns_avx2(Activations& into, const float* x, int64_t ldx, const ColumnRange& range) {
  prepare_range(into, x, ldx,
                {range.row_begin, range.row_end, range.column_begin / block_values, range.column_end / block_values});
}

}  // namespace trivet
