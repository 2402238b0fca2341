// Products of many rows with weights in GGUF blocks on AMX tiles.
//
// A panel is unpacked to int8 once for all rows of a chunk. A tile then multiplies 16 rows by 16 columns over one block
// of 32 values, exactly; its int32 results pass through the L1 to the vector unit, which scales and adds them. The
// floats see the operations of matmul_blocks_avx512.cpp in the same order, so few rows may go there: the same bits.
#include <immintrin.h>

#include <algorithm>

#include "matmul_blocks.h"
#include "panel_prefetch.h"
#include "put_row_avx512.h"
#include "tile_scope.h"

namespace trivet {
namespace {

constexpr int64_t chunk_bytes = 256 << 10;     // activations that stay in the L2 while all panels pass by
constexpr int64_t vector_rows = 4;             // up to here vectors are faster: they unpack in registers
constexpr int64_t tile_block_bytes = 8 * 64;   // 32 values of 16 columns

// The int32 results of a tile on their way to the vector unit.
struct alignas(64) Results {
  int32_t values[16 * 16];
};

// The int8 tiles of a panel: [block][two tiles of 16 columns].
template <WeightFormat format>
void unpack_panel(const uint8_t* panel, int64_t blocks, int8_t* tiles) {
  const __m512i nibble = _mm512_set1_epi8(15), offset = _mm512_set1_epi8(format == WeightFormat::q4_0 ? 8 : 0);
  for (int64_t block = 0; block < blocks; ++block) {
    for (int64_t line = 0; line < tile_block_bytes; line += line_bytes) {
      const __m512i packed = _mm512_loadu_si512(panel + line);
      const __m512i low = _mm512_and_si512(packed, nibble);
      const __m512i high = _mm512_and_si512(_mm512_srli_epi16(packed, 4), nibble);
      _mm512_store_si512(tiles + line, _mm512_sub_epi8(low, offset));
      _mm512_store_si512(tiles + tile_block_bytes + line, _mm512_sub_epi8(high, offset));
    }
    panel += block_bytes(format);
    tiles += 2 * tile_block_bytes;
  }
  asm volatile("" : : : "memory");  // the tile loads of GCC 12 do not say that they read memory
}

// Where one panel's tiles of 16 columns lie, and its scales.
struct TileColumns {
  const uint8_t* tiles;
  int64_t tile_stride;  // from block to block
  const uint8_t* scales;
};

// Products of one block into `results`.
void multiply_block(const MatmulTask& task, int64_t row, const TileColumns& columns, int64_t block, Results& results) {
  _tile_zero(0);
  _tile_loadd(4, block_of(task.x, row, block), line_bytes);
  _tile_loadd(6, columns.tiles + block * columns.tile_stride, line_bytes);
  _tile_dpbssd(0, 4, 6);
  _tile_stored(0, results.values, 64);
}

__m512 halves(const uint8_t* at) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
}

// Inlined, or the sums would pass through memory.
template <WeightFormat format, int rows>
[[gnu::always_inline]] inline void add_block(const MatmulTask& task, int64_t row, const TileColumns& columns,
                                             int64_t block, const Results& results, __m512* sums) {
  const int64_t place = scale_index(task.x, row, block);
  const float* scales = task.x.scales.as<float>() + place;
  const uint8_t* weight_scales = columns.scales + block * block_bytes(format);
  const __m512 d = halves(weight_scales);
  alignas(64) float row_sums[16];
  __m512 m;
  if constexpr (format == WeightFormat::q4_1) {
    m = halves(weight_scales + 64);
    const __m512 integers = _mm512_cvtepi32_ps(_mm512_loadu_si512(task.x.sums.as<int32_t>() + place));
    _mm512_store_ps(row_sums, _mm512_mul_ps(_mm512_loadu_ps(scales), integers));
  }
#pragma GCC unroll 16
  for (int r = 0; r < rows; ++r) {
    const __m512 dot = _mm512_cvtepi32_ps(_mm512_load_si512(results.values + r * 16));
    sums[r] = _mm512_fmadd_ps(dot, _mm512_mul_ps(d, _mm512_set1_ps(scales[r])), sums[r]);
    if constexpr (format == WeightFormat::q4_1) sums[r] = _mm512_fmadd_ps(m, _mm512_set1_ps(row_sums[r]), sums[r]);
  }
}

// `rows` rows (the height of the tiles) by 16 columns, over all of k.
template <WeightFormat format, int rows>
void tile_column(const MatmulTask& task, int64_t row, const TileColumns& columns, float* values, PanelPrefetch& next) {
  const int64_t blocks = task.weight.k / block_values;
  __m512 sums[rows];
#pragma GCC unroll 16
  for (int r = 0; r < rows; ++r) sums[r] = _mm512_setzero_ps();
  // The tile of the next block is under way while this one's results are added. More in flight is slower: loads then
  // meet the low 12 address bits of more stores that are not yet done.
  Results results[2];
  multiply_block(task, row, columns, 0, results[0]);
  for (int64_t block = 0; block < blocks; ++block) {
    if (block + 1 < blocks) multiply_block(task, row, columns, block + 1, results[(block + 1) % 2]);
    next.visit();
    add_block<format, rows>(task, row, columns, block, results[block % 2], sums);
  }
#pragma GCC unroll 16
  for (int r = 0; r < rows; ++r) _mm512_store_ps(values + r * panel_columns, sums[r]);
}

template <WeightFormat format, int tile_rows>
void row_tiles(const MatmulTask& task, int64_t row, int64_t rows, int64_t panel, const uint8_t* tiles,
               int64_t tile_stride, PanelPrefetch& next) {
  alignas(64) float values[tile_rows * panel_columns];
  for (int64_t half = 0; half < 2; ++half) {
    const TileColumns columns{tiles + half * tile_block_bytes, tile_stride,
                              task.panel(panel) + values_bytes(format) + half * 32};
    tile_column<format, tile_rows>(task, row, columns, values + half * 16, next);
  }
  for (int64_t r = 0; r < rows; ++r) {
    const float* from = values + r * panel_columns;
    put_row(task, _mm512_load_ps(from), _mm512_load_ps(from + 16), row + r, panel);
  }
}

template <WeightFormat format>
void matmul_format(const MatmulTask& task) {
  const auto [row_begin, row_end, panel_begin, panel_end] = task.range;
  const int64_t blocks = task.weight.k / block_values;
  const bool low = row_end - row_begin <= 8;
  const TileScope scope(low ? 8 : 16, 32);
  int8_t* const unpacked = format == WeightFormat::q8_0 ? nullptr : thread_scratch(blocks * 2 * tile_block_bytes);
  const int64_t chunk_rows = std::max<int64_t>(64, chunk_bytes / (task.x.steps * line_bytes) / 16 * 16);
  for (int64_t chunk = row_begin; chunk < row_end; chunk += chunk_rows) {
    const int64_t chunk_end = std::min(chunk + chunk_rows, row_end);
    const int64_t visits = (chunk_end - chunk + 15) / 16 * 2 * blocks;
    for (int64_t panel = panel_begin; panel < panel_end; ++panel) {
      const uint8_t* tiles = task.panel(panel);
      int64_t tile_stride = block_bytes(format);
      if constexpr (format != WeightFormat::q8_0) {
        unpack_panel<format>(tiles, blocks, unpacked);
        tiles = reinterpret_cast<const uint8_t*>(unpacked);
        tile_stride = 2 * tile_block_bytes;
      }
      PanelPrefetch next(task.panel(panel + 1), panel + 1 == panel_end ? 0 : task.weight.panel_bytes, visits);
      for (int64_t row = chunk; row < chunk_end; row += row_block) {
        const int64_t rows = std::min(row_block, chunk_end - row);
        if (low) {
          row_tiles<format, 8>(task, row, rows, panel, tiles, tile_stride, next);
        } else {
          row_tiles<format, 16>(task, row, rows, panel, tiles, tile_stride, next);
        }
      }
    }
  }
}

}  // namespace

void matmul_blocks_amx(const MatmulTask& task) {
  if (task.range.row_end - task.range.row_begin <= vector_rows) return matmul_blocks_avx512(task);
  switch (task.weight.format) {
    case WeightFormat::q4_0: return matmul_format<WeightFormat::q4_0>(task);
    case WeightFormat::q4_1: return matmul_format<WeightFormat::q4_1>(task);
    default: return matmul_format<WeightFormat::q8_0>(task);
  }
}

}  // namespace trivet
