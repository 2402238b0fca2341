// Weights in GGUF blocks: into panels and, for single rows, back to floats.
#include <cassert>
#include <cstring>

#include "matmul_blocks.h"

namespace trivet {
namespace {

// Bytes of one GGUF block.
int64_t source_bytes(WeightFormat format) {
  return format == WeightFormat::q8_0 ? 34 : format == WeightFormat::q4_1 ? 20 : 18;
}

// Bytes of d and m at the head of a GGUF block.
int64_t head_bytes(WeightFormat format) { return format == WeightFormat::q4_1 ? 4 : 2; }

void pack_block(WeightFormat format, const uint8_t* from, uint8_t* panel_block, int64_t column) {
  const uint8_t* values = from + head_bytes(format);
  if (format == WeightFormat::q8_0) {
    for (int64_t k = 0; k < block_values; ++k) {
      panel_block[column / 16 * 512 + k / 4 * line_bytes + column % 16 * 4 + k % 4] = values[k];
    }
  } else {
    const int shift = column < 16 ? 0 : 4;
    for (int64_t k = 0; k < block_values; ++k) {
      const int nibble = k < 16 ? values[k] & 15 : values[k - 16] >> 4;
      uint8_t& byte = panel_block[k / 4 * line_bytes + column % 16 * 4 + k % 4];
      byte = static_cast<uint8_t>((byte & ~(15 << shift)) | nibble << shift);
    }
  }
  uint8_t* scales = panel_block + values_bytes(format);
  std::memcpy(scales + column * 2, from, 2);
  if (format == WeightFormat::q4_1) std::memcpy(scales + 64 + column * 2, from + 2, 2);
}

float half_at(const uint8_t* at) {
  _Float16 value;
  std::memcpy(&value, at, 2);
  return static_cast<float>(value);
}

}  // namespace

void pack_blocks(PackedWeight& weight, const uint8_t* rows, int64_t row_begin, int64_t row_end) {
  const int64_t blocks = weight.k / block_values;
  for (int64_t row = row_begin; row < row_end; ++row) {
    uint8_t* panel = weight.data.as<uint8_t>() + row / panel_columns * weight.panel_bytes;
    for (int64_t block = 0; block < blocks; ++block) {
      pack_block(weight.format, rows, panel + block * block_bytes(weight.format), row % panel_columns);
      rows += source_bytes(weight.format);
    }
  }
}

void unpack_blocks_row(const PackedWeight& weight, int64_t row, float* into) {
  const int64_t column = row % panel_columns;
  const uint8_t* panel_block = weight.data.as<uint8_t>() + row / panel_columns * weight.panel_bytes;
  for (int64_t block = 0; block < weight.k / block_values; ++block) {
    const uint8_t* scales = panel_block + values_bytes(weight.format);
    const float d = half_at(scales + column * 2);
    const float m = weight.format == WeightFormat::q4_1 ? half_at(scales + 64 + column * 2) : 0.0f;
    for (int64_t k = 0; k < block_values; ++k) {
      const int64_t at = k / 4 * line_bytes + column % 16 * 4 + k % 4;
      if (weight.format == WeightFormat::q8_0) {
        *into++ = static_cast<float>(static_cast<int8_t>(panel_block[column / 16 * 512 + at])) * d;
      } else {
        const int nibble = column < 16 ? panel_block[at] & 15 : panel_block[at] >> 4;
        *into++ = weight.format == WeightFormat::q4_0 ? static_cast<float>(nibble - 8) * d : static_cast<float>(nibble) * d + m;
      }
    }
    panel_block += block_bytes(weight.format);
  }
}

}  // namespace trivet
