// Paged attention in bfloat16 on AMX tiles. Compiled for AMX; called only where the processor has it (see isa.h).
#include <immintrin.h>

#include "attention_task.h"
#include "tile_scope.h"

namespace trivet {
namespace {

// GCC 12 does not know that a tile is loaded from memory: what was written there has to be by now.
inline void written() { asm volatile("" : : : "memory"); }

struct AmxEngine {
  using Cell = Bfloat16;
  using Weight = Bfloat16;

  static void store_weights(Weight* to, Floats values) { store_bfloat16(to, values); }

  TileScope scope{16, 64};

  // Tiles 0 to 3 gather, 4 and 5 hold rows, 6 and 7 cache.
  void scores(const Cell* query, int64_t rows, int64_t size, const Cell* const* keys, int64_t count, float* s,
              int64_t stride) {
    written();
    for (int64_t sub = 0; sub < count; sub += 2) {
      for (int64_t row = 0; row < rows; row += 32) {
        const bool two = row + 16 < rows;
        _tile_zero(0);
        _tile_zero(1);
        if (two) {
          _tile_zero(2);
          _tile_zero(3);
        }
        for (int64_t at = 0; at < size; at += 32) {
          _tile_loadd(6, keys[sub] + at * SUB_BLOCK, 64);
          _tile_loadd(7, keys[sub + 1] + at * SUB_BLOCK, 64);
          _tile_loadd(4, query + row * size + at, size * 2);
          _tile_dpbf16ps(0, 4, 6);
          _tile_dpbf16ps(1, 4, 7);
          if (two) {
            _tile_loadd(5, query + (row + 16) * size + at, size * 2);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
          }
        }
        float* to = s + row * stride + sub * SUB_BLOCK;
        _tile_stored(0, to, stride * 4);
        _tile_stored(1, to + 16, stride * 4);
        if (two) {
          _tile_stored(2, to + 16 * stride, stride * 4);
          _tile_stored(3, to + 16 * stride + 16, stride * 4);
        }
      }
    }
  }

  void values(const Weight* weights, int64_t rows, int64_t stride, const Cell* const* values, int64_t count,
              int64_t size, float* out) {
    alignas(64) Bfloat16 together[16][32];  // the pairs of two sub-blocks, 16 dimensions: one tile
    for (int64_t row = 0; row < rows; row += 32) {
      const bool two = row + 16 < rows;
      for (int64_t at = 0; at < size; at += 32) {
        _tile_zero(0);
        _tile_zero(1);
        if (two) {
          _tile_zero(2);
          _tile_zero(3);
        }
        for (int64_t sub = 0; sub < count; sub += 2) {
          for (int half = 0; half < 2; ++half) {
            for (int pair = 0; pair < 8; ++pair) {
              const int64_t offset = (pair * size + at + 16 * half) * 2;
              _mm512_store_si512(together[pair], _mm512_loadu_si512(values[sub] + offset));
              _mm512_store_si512(together[8 + pair], _mm512_loadu_si512(values[sub + 1] + offset));
            }
            written();
          if (half == 0) {
              _tile_loadd(6, together, 64);
            } else {
              _tile_loadd(7, together, 64);
            }
          }
          _tile_loadd(4, weights + row * stride + sub * SUB_BLOCK, stride * 2);
          _tile_dpbf16ps(0, 4, 6);
          _tile_dpbf16ps(1, 4, 7);
          if (two) {
            _tile_loadd(5, weights + (row + 16) * stride + sub * SUB_BLOCK, stride * 2);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
          }
        }
        float* to = out + row * size + at;
        _tile_stored(0, to, size * 4);
        _tile_stored(1, to + 16, size * 4);
        if (two) {
          _tile_stored(2, to + 16 * size, size * 4);
          _tile_stored(3, to + 16 * size + 16, size * 4);
        }
      }
    }
  }
};

}  // namespace

Attend attention_amx_bfloat16() { return attend<AmxEngine>; }

}  // namespace trivet
