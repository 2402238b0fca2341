// Floats to blocks of 32 bytes with a scale and a minimum: value = d * q + m.
//
// The range of a block is cut into 255 steps or a few less, whichever number has the least error: values that come from
// fewer levels at equal distances, as those of a 4-bit file do, lie on the steps for one of these numbers (from 240 to
// 255 every number up to 16 has a multiple), and then nothing is lost but the rounding of d and m to half precision.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "matmul_blocks.h"

namespace trivet {
namespace {

constexpr int most_steps = 255, fewest_steps = 240;
constexpr float least_value = -128.0f, greatest_value = 127.0f;
constexpr float rounding = 0.05f;  // of a step: an error that d and m alone may cause

struct Quantised {
  float values[block_values];  // whole numbers
  _Float16 scale, minimum;
  float error;  // sum of squares
};

void quantise_with(const float* values, float least, float range, int steps, Quantised& into) {
  into.scale = static_cast<_Float16>(range / static_cast<float>(steps));
  const auto scale = static_cast<float>(into.scale);
  into.minimum = static_cast<_Float16>(least - least_value * scale);
  const auto minimum = static_cast<float>(into.minimum);
  const float inverse = scale == 0.0f ? 0.0f : 1.0f / scale;
  constexpr float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number
  float errors[4] = {};
  for (int64_t k = 0; k < block_values; ++k) {
    const float place = std::min(std::max((values[k] - minimum) * inverse, least_value), greatest_value);
    into.values[k] = (place + magic) - magic;
    const float off = values[k] - (scale * into.values[k] + minimum);
    errors[k % 4] += off * off;
  }
  into.error = (errors[0] + errors[1]) + (errors[2] + errors[3]);
}

Quantised quantise_block(const float* values) {
  const auto [least, greatest] = std::minmax_element(values, values + block_values);
  const float range = *greatest - *least;
  Quantised best, other;
  quantise_with(values, *least, range, most_steps, best);
  for (int steps = most_steps - 1; steps >= fewest_steps; --steps) {
    const float step = rounding * static_cast<float>(best.scale);
    if (best.error <= block_values * step * step) break;
    quantise_with(values, *least, range, steps, other);
    if (other.error < best.error) best = other;
  }
  return best;
}

}  // namespace

void quantise_row(PackedWeight& weight, int64_t row, const float* values) {
  constexpr WeightFormat format = WeightFormat::q8_minimum;
  const int64_t column = row % panel_columns;
  uint8_t* block = weight.data.as<uint8_t>() + row / panel_columns * weight.panel_bytes;
  for (int64_t index = 0; index < weight.k / block_values;
       ++index, block += block_bytes(format), values += block_values) {
    const Quantised quantised = quantise_block(values);
    for (int64_t k = 0; k < block_values; ++k) {
      const int64_t at = column / 16 * 512 + k / 4 * line_bytes + column % 16 * 4 + k % 4;
      block[at] = static_cast<uint8_t>(static_cast<int8_t>(quantised.values[k]));
    }
    uint8_t* scales = block + values_bytes(format);
    std::memcpy(scales + column * 2, &quantised.scale, 2);
    std::memcpy(scales + 64 + column * 2, &quantised.minimum, 2);
  }
}

}  // namespace trivet
