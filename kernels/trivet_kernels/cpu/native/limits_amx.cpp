// The loops on tiles: four accumulators, two tiles of activations and two of weights, as the products hold them.
#include <immintrin.h>

#include "limits.h"
#include "tile_scope.h"

namespace trivet {
namespace {

constexpr int64_t TILE_ROWS = 16, TILE_BYTES = 64;

// Values like those of real work: zeros draw less power and run faster.
struct alignas(64) Values {
  Values() {
    uint32_t state = 1;
    for (auto& value : bf16) {
      state = state * 1664525 + 1013904223;
      value = static_cast<uint16_t>(0x3f00 | (state >> 24) | (state >> 8 & 0x8000));
    }
  }
  uint16_t bf16[4 * TILE_ROWS * TILE_BYTES / 2];
};

void load_tiles(const Values& values) {
  asm volatile("" : : "r"(&values) : "memory");  // GCC 12 takes a tile's load to read no memory
  _tile_loadd(4, values.bf16, TILE_BYTES);
  _tile_loadd(5, values.bf16 + 512, TILE_BYTES);
  _tile_loadd(6, values.bf16 + 1024, TILE_BYTES);
  _tile_loadd(7, values.bf16 + 1536, TILE_BYTES);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

void products_bf16(int64_t turns) {
  const Values values;
  const TileScope scope(TILE_ROWS, TILE_BYTES);
  load_tiles(values);
  for (int64_t i = 0; i < turns; ++i) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
}

void products_i8(int64_t turns) {
  const Values values;
  const TileScope scope(TILE_ROWS, TILE_BYTES);
  load_tiles(values);
  for (int64_t i = 0; i < turns; ++i) {
    _tile_dpbssd(0, 4, 6);
    _tile_dpbssd(1, 4, 7);
    _tile_dpbssd(2, 5, 6);
    _tile_dpbssd(3, 5, 7);
  }
}

}  // namespace

ProductLoop product_loop_amx(LimitFormat format) {
  if (format == LimitFormat::bf16) return {products_bf16, 4 * TILE_ROWS * TILE_ROWS * 32 * 2};
  if (format == LimitFormat::i8) return {products_i8, 4 * TILE_ROWS * TILE_ROWS * 64 * 2};
  return {};
}

}  // namespace trivet
