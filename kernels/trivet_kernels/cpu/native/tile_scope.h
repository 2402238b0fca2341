// The AMX tile configuration of the products, for the time of one call.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace trivet {
namespace {  // each instruction set's file has its own copy

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes_per_row[16] = {};
  uint8_t rows[16] = {};
};

// Accumulators 0 to 3 and activations 4 and 5 with `rows` rows; weights in 6 and 7. A line of activations has
// `activation_bytes` bytes, so weights have a quarter of that in rows. Released at the end, so that a switch of threads does
// not save 8 KiB of tiles.
class TileScope {
 public:
  TileScope(int64_t rows, int64_t activation_bytes) {
    TileConfig config;
    for (int tile = 0; tile < 8; ++tile) {
      const bool activations = tile == 4 || tile == 5;
      config.bytes_per_row[tile] = static_cast<uint16_t>(activations ? activation_bytes : 64);
      config.rows[tile] = static_cast<uint8_t>(tile < 6 ? rows : activation_bytes / 4);
    }
    // GCC 12's intrinsic tells the compiler of the first eight bytes only; without this the others may stay unwritten.
    asm volatile("" : : "r"(&config) : "memory");
    _tile_loadconfig(&config);
  }
  ~TileScope() { _tile_release(); }
  TileScope(const TileScope&) = delete;
  TileScope& operator=(const TileScope&) = delete;
};

}  // namespace
}  // namespace trivet
