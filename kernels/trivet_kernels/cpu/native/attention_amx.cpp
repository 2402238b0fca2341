// Paged attention in bfloat16 on AMX tiles. Compiled for AMX; called only where the processor has it (see isa.h).
#include <immintrin.h>

#include "attention_avx512.h"
#include "attention_task.h"
#include "tile_scope.h"

namespace trivet {
namespace {

// GCC 12 does not know that a tile is loaded from memory: what was written there has to be by now.
inline void written() { asm volatile("" : : : "memory"); }

constexpr int64_t TILE = 16 * 32;  // cells

// Tiles 0 to 3 gather, 4 and 5 hold rows, 6 and 7 cache. Up to 16 rows take tiles of so many: the time of a product is
// that of its rows.
struct AmxEngine {
  using Cell = Bfloat16;
  using Weight = Bfloat16;
  static constexpr bool TAKES_INT8 = true;

  explicit AmxEngine(int64_t rows) : scope(rows < 16 ? rows : 16, 64), is_narrow(rows <= 16) {}

  static Floats power(Floats x) { return power_for_bfloat16(x); }
  static void store_weights(Weight* to, Floats values) { put_bfloat16(to, values); }
  static void widen(const int8_t* cells, int64_t count, Cell* to) { widen_to_bfloat16(cells, count, to); }

  TileScope scope;
  const bool is_narrow;   // up to 16 rows: what they read is arranged as it is multiplied, and stays in the L1
  Cell* pairs = nullptr;  // wide: of the chunk, [count / 2][D / 16] tiles, the pairs of two sub-blocks each;
                          // narrow: room for a few tiles

  // Values of two sub-blocks under each other are one tile high: those of dimensions [from, to).
  static void arrange(const Chunk<Cell>& chunk, int64_t sub, int64_t size, int64_t from, int64_t to, Cell* tiles) {
    for (int64_t half = 0; half < 2; ++half) {
      for (int64_t pair = 0; pair < 8; ++pair) {
        Cell* line = tiles + (half * 8 + pair) * 32;
        if (chunk.key_scales != nullptr) {
          const int8_t* cells = chunk.int8_values[sub + half] + pair * size * 2;
          for (int64_t at = from; at < to; at += 32, line += 2 * TILE) {
            widen_64(cells + at * 2, line, line + TILE);
          }
        } else {
          const Cell* cells = chunk.values[sub + half] + pair * size * 2;
          for (int64_t at = from; at < to; at += 16, line += TILE) {
            _mm512_store_si512(line, _mm512_loadu_si512(cells + at * 2));
          }
        }
      }
    }
  }

  void take(const Chunk<Cell>& chunk, int64_t size, Cell* memory) {
    pairs = memory;
    for (int64_t sub = 0; sub < chunk.count && !is_narrow; sub += 2) {
      arrange(chunk, sub, size, 0, size, pairs + sub / 2 * (size / 16) * TILE);
    }
  }

  void scores(const Cell* query, int64_t rows, int64_t size, const Chunk<Cell>& chunk, float* s, const Ahead& ahead) {
    constexpr int64_t stride = SCORE_STRIDE;
    const bool two = rows > 16;
    written();
    for (int64_t sub = 0; sub < chunk.count; sub += 2) {
      ahead.touch(sub);
      ahead.touch(sub + 1);
      _tile_zero(0);
      _tile_zero(1);
      if (two) {
        _tile_zero(2);
        _tile_zero(3);
      }
      for (int64_t at = 0; at < size; at += 32) {
        _tile_loadd(6, chunk.keys[sub] + at * SUB_BLOCK, 64);
        _tile_loadd(7, chunk.keys[sub + 1] + at * SUB_BLOCK, 64);
        _tile_loadd(4, query + at, size * 2);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (two) {
          _tile_loadd(5, query + 16 * size + at, size * 2);
          _tile_dpbf16ps(2, 5, 6);
          _tile_dpbf16ps(3, 5, 7);
        }
      }
      float* to = s + sub * SUB_BLOCK;
      _tile_stored(0, to, stride * 4);
      _tile_stored(1, to + 16, stride * 4);
      if (two) {
        _tile_stored(2, to + 16 * stride, stride * 4);
        _tile_stored(3, to + 16 * stride + 16, stride * 4);
      }
    }
    written();
  }

  void narrow_values(const Weight* weights, int64_t size, const Chunk<Cell>& chunk, float* out, const Ahead& ahead) {
    for (int64_t at = 0; at < size; at += 64) {
      const int64_t end = size - at < 64 ? size : at + 64;
      const bool four = end - at == 64;
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
      if (chunk.count > 0) {
        arrange(chunk, 0, size, at, end, pairs);
      }
      for (int64_t sub = 0; sub < chunk.count; sub += 2) {
        if (at == 0) {  // a few at a time, or they wait for each other
          ahead.touch(sub);
          ahead.touch(sub + 1);
        }
        const Cell* tiles = pairs + sub / 2 % 2 * 4 * TILE;
        if (sub + 2 < chunk.count) {  // one pair ahead, so that no tile waits for its stores
          arrange(chunk, sub + 2, size, at, end, pairs + (sub / 2 + 1) % 2 * 4 * TILE);
        }
        written();
        _tile_loadd(4, weights + sub * SUB_BLOCK, weight_stride<Weight> * 2);
        _tile_loadd(6, tiles, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, tiles + TILE, 64);
        _tile_dpbf16ps(1, 4, 7);
        if (four) {
          _tile_loadd(6, tiles + 2 * TILE, 64);
          _tile_dpbf16ps(2, 4, 6);
          _tile_loadd(7, tiles + 3 * TILE, 64);
          _tile_dpbf16ps(3, 4, 7);
        }
      }
      _tile_stored(0, out + at, size * 4);
      _tile_stored(1, out + at + 16, size * 4);
      if (four) {
        _tile_stored(2, out + at + 32, size * 4);
        _tile_stored(3, out + at + 48, size * 4);
      }
    }
    written();
  }

  void values(const Weight* weights, int64_t rows, int64_t size, const Chunk<Cell>& chunk, float* out,
              const Ahead& ahead) {
    if (is_narrow) {
      narrow_values(weights, size, chunk, out, ahead);
      return;
    }
    constexpr int64_t stride = weight_stride<Weight>;
    const bool two = rows > 16;
    written();
    for (int64_t at = 0; at < size; at += 32) {
      _tile_zero(0);
      _tile_zero(1);
      if (two) {
        _tile_zero(2);
        _tile_zero(3);
      }
      for (int64_t sub = 0; sub < chunk.count; sub += 2) {
        if (at == 0) {  // a few at a time, or they wait for each other
          ahead.touch(sub);
          ahead.touch(sub + 1);
        }
        const Cell* from = pairs + (sub / 2 * (size / 16) + at / 16) * TILE;
        _tile_loadd(6, from, 64);
        _tile_loadd(7, from + TILE, 64);
        _tile_loadd(4, weights + sub * SUB_BLOCK, stride * 2);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (two) {
          _tile_loadd(5, weights + 16 * stride + sub * SUB_BLOCK, stride * 2);
          _tile_dpbf16ps(2, 5, 6);
          _tile_dpbf16ps(3, 5, 7);
        }
      }
      float* to = out + at;
      _tile_stored(0, to, size * 4);
      _tile_stored(1, to + 16, size * 4);
      if (two) {
        _tile_stored(2, to + 16 * size, size * 4);
        _tile_stored(3, to + 16 * size + 16, size * 4);
      }
    }
    written();
  }
};

}  // namespace

const AttentionKernels& attention_amx_bfloat16(bool is_int8) { return kernels_of<AmxEngine>(is_int8); }

}  // namespace trivet
