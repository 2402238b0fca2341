// Single values of weights in blocks: what the layout of matmul_blocks.h stands for, written for clearness.
#pragma once

#include <cstring>

#include "matmul_blocks.h"

namespace trivet {
namespace {

inline float half_at(const uint8_t* at) {
  _Float16 value;
  std::memcpy(&value, at, 2);
  return static_cast<float>(value);
}

// Where value k of a block lies in a line of activations: of each four, 1 and 2 change places.
constexpr int64_t pair_order(int64_t k) { return k % 4 == 1 ? k + 1 : k % 4 == 2 ? k - 1 : k; }

// As it enters the integer dot product.
template <WeightFormat format>
int value_at(const BlockWalk<format>& walk, int64_t column, int64_t k) {
  const int64_t at = k / 4 * line_bytes + column % 16 * 4 + k % 4;
  if constexpr (!has_nibbles(format)) return static_cast<int8_t>(walk.block[column / 16 * 512 + at]);
  return (column < 16 ? walk.block[at] & 15 : walk.block[at] >> 4) - stored_offset(format);
}

template <WeightFormat format>
float scale_at(const BlockWalk<format>& walk, int64_t column, int64_t k) {
  const uint8_t* scales = walk.scales();
  if constexpr (format == WeightFormat::q6_k) {
    return half_at(walk.header + column * 2) * static_cast<float>(static_cast<int8_t>(scales[k / 16 * 32 + column]));
  } else if constexpr (has_header(format)) {
    return half_at(walk.header + column * 2) * static_cast<float>(scales[column]);
  } else {
    return half_at(scales + column * 2);
  }
}

template <WeightFormat format>
float minimum_at(const BlockWalk<format>& walk, int64_t column) {
  if constexpr (has_header(format)) {
    return -half_at(walk.header + 64 + column * 2) * static_cast<float>(walk.scales()[32 + column]);
  } else {
    return half_at(walk.scales() + 64 + column * 2);
  }
}

}  // namespace
}  // namespace trivet
