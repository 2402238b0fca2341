// Symmetric quantisation of activations, the same to the bit in every instruction set: to int8, or to 12 bits.
//
// Magnitudes are compared as the bits of their floats, where NaN and infinity come out on top: such values give a NaN
// scale and zeros, so the outputs that depend on them become NaN and nothing is converted out of range.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace trivet {

struct QuantisationScale {
  float scale;    // value = scale * integer
  float inverse;  // 0 where all values are to become 0
};

static inline uint32_t largest_magnitude_bits(const float* values, int64_t count) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    uint32_t bits;
    std::memcpy(&bits, values + i, 4);
    largest = std::max(largest, bits & 0x7fffffffu);
  }
  return largest;
}

// Levels on each side of 0.
constexpr float int8_levels = 127.0f, block_levels = 127.0f * 16.0f;

static inline QuantisationScale scale_for(uint32_t largest_bits, float levels = int8_levels) {
  if (largest_bits >= 0x7f800000u) return {std::numeric_limits<float>::quiet_NaN(), 0.0f};
  float largest;
  std::memcpy(&largest, &largest_bits, 4);
  if (largest < 1e-30f) return {0.0f, 0.0f};  // below, the inverse overflows
  return {largest / levels, levels / largest};
}

static inline int32_t quantise(float value, QuantisationScale scale) {
  // Not value * 0 for NaN and infinity; |value * inverse| cannot round above the levels.
  return scale.inverse == 0.0f ? 0 : static_cast<int32_t>(std::nearbyint(value * scale.inverse));
}

}  // namespace trivet
