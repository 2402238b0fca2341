// Products of many rows with weights in blocks on AMX tiles.
//
// A tile multiplies 16 rows by 16 columns over the values that share a scale, exactly; its int32 results pass through
// the L1 to the vector unit, which scales and adds them. Weights of 4 bits are unpacked once for all rows of a chunk,
// as 16 * w and w, and meet both parts of an activation in one tile; those of 8 bits meet one part after the other. The
// floats see the operations of matmul_blocks_avx512.cpp in the same order, so few rows may go there: the same bits.
#include <immintrin.h>

#include <algorithm>

#include "block_scales_avx512.h"
#include "panel_prefetch.h"
#include "put_row_avx512.h"
#include "tile_scope.h"

namespace trivet {
namespace {

constexpr int64_t chunk_bytes = 256 << 10;  // activations that stay in the L2 while all panels pass by
constexpr int64_t vector_rows = 4;          // up to here vectors are faster: they unpack in registers
constexpr int64_t tile_bytes = 1024;

// The int32 results of a tile on their way to the vector unit; of 8-bit weights those of the lower parts come second.
struct alignas(64) Results {
  int32_t values[2][16 * 16];
};

// The tiles of a panel of 4-bit weights: [block][two tiles of 16 columns], 8 lines of 16 * w, 8 of w. Signed, or
// unsigned where there is no offset to take off.
template <WeightFormat format>
void unpack_panel(const uint8_t* panel, int64_t blocks, uint8_t* tiles) {
  const __m512i low = _mm512_set1_epi8(15), high = _mm512_set1_epi8(static_cast<char>(0xf0));
  const __m512i offset = _mm512_set1_epi8(stored_offset(format));
  const __m512i high_offset = _mm512_set1_epi8(static_cast<char>(16 * stored_offset(format)));
  BlockWalk<format> walk(panel);
  for (int64_t block = 0; block < blocks; ++block, walk.next(), tiles += 2 * tile_bytes) {
    for (int64_t line = 0; line < line_groups * line_bytes; line += line_bytes) {
      const __m512i packed = _mm512_loadu_si512(walk.block + line);
      const __m512i first = _mm512_and_si512(_mm512_slli_epi16(packed, 4), high);
      const __m512i second = _mm512_and_si512(packed, high);
      _mm512_store_si512(tiles + line, _mm512_sub_epi8(first, high_offset));
      _mm512_store_si512(tiles + 512 + line, _mm512_sub_epi8(_mm512_and_si512(packed, low), offset));
      _mm512_store_si512(tiles + tile_bytes + line, _mm512_sub_epi8(second, high_offset));
      _mm512_store_si512(tiles + tile_bytes + 512 + line,
                         _mm512_sub_epi8(_mm512_and_si512(_mm512_srli_epi16(packed, 4), low), offset));
    }
  }
  asm volatile("" : : : "memory");  // the tile loads of GCC 12 do not say that they read memory
}

// Products of the values of one scale into `results`. 4 bits: 64 bytes of both parts by a whole tile.
template <WeightFormat format>
[[gnu::always_inline]] inline void multiply(const uint8_t* x, const uint8_t* weights, Results& results) {
  _tile_zero(0);
  _tile_loadd(4, x, line_bytes);
  _tile_loadd(6, weights, line_bytes);
  if constexpr (has_minimum(format) && has_nibbles(format)) {
    _tile_dpbsud(0, 4, 6);
  } else {
    _tile_dpbssd(0, 4, 6);
  }
  _tile_stored(0, results.values[0], 64);
  if constexpr (!has_nibbles(format)) {
    _tile_zero(1);
    _tile_loadd(5, x + 32, line_bytes);
    _tile_dpbssd(1, 5, 6);
    _tile_stored(1, results.values[1], 64);
  }
}

// Inlined, or the sums would pass through memory.
template <WeightFormat format, int rows>
[[gnu::always_inline]] inline void add_part(const MatmulTask& task, int64_t place, const BlockWalk<format>& walk,
                                            int64_t half, int64_t part, const Results& results, __m512* sums) {
  constexpr int64_t parts = block_values / scale_values(format);
  const float* scales = task.x.scales.as<float>() + place;
  const __m512 d = scales_of(walk, half, part);
  alignas(64) float row_sums[16];
  __m512 m;
  const bool adds_minimum = has_minimum(format) && part + 1 == parts;
  if constexpr (has_minimum(format)) {
    m = minimums_of(walk, half);
    const __m512 integers = _mm512_cvtepi32_ps(_mm512_loadu_si512(task.x.sums.as<int32_t>() + place));
    _mm512_store_ps(row_sums, _mm512_mul_ps(_mm512_loadu_ps(scales), integers));
  }
#pragma GCC unroll 16
  for (int r = 0; r < rows; ++r) {
    __m512i dot = _mm512_load_si512(results.values[0] + r * 16);
    if constexpr (!has_nibbles(format)) {
      dot = _mm512_add_epi32(_mm512_slli_epi32(dot, 4), _mm512_load_si512(results.values[1] + r * 16));
    }
    sums[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), _mm512_mul_ps(d, _mm512_set1_ps(scales[r])), sums[r]);
    if (adds_minimum) sums[r] = _mm512_fmadd_ps(m, _mm512_set1_ps(row_sums[r]), sums[r]);
  }
}

// Where the tiles of 16 columns lie that come in turn.
template <WeightFormat format>
struct TileWalk {
  const uint8_t* unpacked;  // null where the panel's own lines are tiles
  int64_t half;
  BlockWalk<format> blocks;

  [[gnu::always_inline]] const uint8_t* tile(int64_t index, int64_t part) const {
    if constexpr (has_nibbles(format)) return unpacked + (2 * index + half) * tile_bytes;
    return blocks.block + half * 512 + part * 256;
  }
};

// `rows` rows (the height of the tiles) by 16 columns, over all of k.
template <WeightFormat format, int rows>
void tile_column(const MatmulTask& task, int64_t row, const uint8_t* panel, const uint8_t* unpacked, int64_t half,
                 float* values, PanelPrefetch& next) {
  constexpr int64_t parts = block_values / scale_values(format);
  const int64_t blocks = task.x.steps;
  __m512 sums[rows];
#pragma GCC unroll 16
  for (int r = 0; r < rows; ++r) sums[r] = _mm512_setzero_ps();
  // The next tile is under way while this one's results are added. More in flight is slower: loads then meet the low 12
  // address bits of more stores that are not yet done.
  Results results[2];
  TileWalk<format> ahead{unpacked, half, BlockWalk<format>(panel)};
  BlockWalk<format> walk(panel);
  multiply<format>(task.x.line(row, 0), ahead.tile(0, 0), results[0]);
  for (int64_t block = 0; block < blocks; ++block, walk.next()) {
    for (int64_t part = 0; part < parts; ++part) {
      const int64_t index = block * parts + part;
      if (part + 1 < parts) {
        multiply<format>(task.x.line(row, block) + 16, ahead.tile(block, 1), results[(index + 1) % 2]);
      } else if (block + 1 < blocks) {
        ahead.blocks.next();
        multiply<format>(task.x.line(row, block + 1), ahead.tile(block + 1, 0), results[(index + 1) % 2]);
      }
      next.visit();
      add_part<format, rows>(task, scale_index(task.x, row, block), walk, half, part, results[index % 2], sums);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < rows; ++r) _mm512_store_ps(values + r * panel_columns, sums[r]);
}

template <WeightFormat format, int tile_rows>
void row_tiles(const MatmulTask& task, int64_t row, int64_t rows, int64_t panel, const uint8_t* unpacked,
               PanelPrefetch& next) {
  alignas(64) float values[tile_rows * panel_columns];
  for (int64_t half = 0; half < 2; ++half) {
    tile_column<format, tile_rows>(task, row, task.panel(panel), unpacked, half, values + half * 16, next);
  }
  for (int64_t r = 0; r < rows; ++r) {
    const float* from = values + r * panel_columns;
    put_row(task, _mm512_load_ps(from), _mm512_load_ps(from + 16), row + r, panel);
  }
}

template <WeightFormat format>
void matmul_format(const MatmulTask& task) {
  const auto [row_begin, row_end, panel_begin, panel_end] = task.range;
  const int64_t blocks = task.x.steps;
  const bool low = row_end - row_begin <= 8;
  const TileScope scope(low ? 8 : 16, has_nibbles(format) ? 64 : scale_values(format));
  uint8_t* unpacked = nullptr;
  if (has_nibbles(format)) unpacked = reinterpret_cast<uint8_t*>(thread_scratch(blocks * 2 * tile_bytes));
  const int64_t chunk_rows = std::max<int64_t>(64, chunk_bytes / (blocks * line_bytes) / 16 * 16);
  for (int64_t chunk = row_begin; chunk < row_end; chunk += chunk_rows) {
    const int64_t chunk_end = std::min(chunk + chunk_rows, row_end);
    const int64_t visits = (chunk_end - chunk + 15) / 16 * 2 * blocks;
    for (int64_t panel = panel_begin; panel < panel_end; ++panel) {
      if constexpr (has_nibbles(format)) unpack_panel<format>(task.panel(panel), blocks, unpacked);
      PanelPrefetch next(task.panel(panel + 1), panel + 1 == panel_end ? 0 : task.weight.panel_bytes, visits);
      for (int64_t row = chunk; row < chunk_end; row += row_block) {
        const int64_t rows = std::min(row_block, chunk_end - row);
        if (low) {
          row_tiles<format, 8>(task, row, rows, panel, unpacked, next);
        } else {
          row_tiles<format, 16>(task, row, rows, panel, unpacked, next);
        }
      }
    }
  }
}

}  // namespace

void matmul_blocks_amx(const MatmulTask& task) {
  if (task.range.row_end - task.range.row_begin <= vector_rows) return matmul_blocks_avx512(task);
  with_block_format(task.weight.format, [&](auto format) { matmul_format<decltype(format)::value>(task); });
}

}  // namespace trivet
