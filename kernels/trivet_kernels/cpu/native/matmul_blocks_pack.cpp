// Weights in blocks: out of a file's blocks or out of floats into panels and, for single rows, back to floats.
#include <cassert>
#include <cstring>
#include <vector>

#include "block_values.h"

namespace trivet {
namespace {

// 32 values of a row as a panel keeps them: nibbles, or int8.
struct Values {
  uint8_t stored[block_values];
};

template <WeightFormat format>
void put_values(uint8_t* block, int64_t column, const Values& values) {
  const int shift = column < 16 ? 0 : 4;
  for (int64_t k = 0; k < block_values; ++k) {
    const int64_t at = k / 4 * line_bytes + column % 16 * 4 + k % 4;
    if (has_nibbles(format)) {
      block[at] = static_cast<uint8_t>((block[at] & ~(15 << shift)) | values.stored[k] << shift);
    } else {
      block[column / 16 * 512 + at] = values.stored[k];
    }
  }
}

// Sixteen bytes: the low nibbles are values 0 to 15, the high ones 16 to 31; with a fifth bit each where there are
// such.
Values nibbles_of(const uint8_t* packed, const uint8_t* fifth_bits, int offset) {
  uint32_t fifth = 0;
  if (fifth_bits != nullptr) std::memcpy(&fifth, fifth_bits, 4);
  Values values;
  for (int64_t k = 0; k < block_values; ++k) {
    const int nibble = k < 16 ? packed[k] & 15 : packed[k - 16] >> 4;
    values.stored[k] = static_cast<uint8_t>((nibble | (fifth >> k & 1) << 4) - offset);
  }
  return values;
}

// A block of 32 values with a scale and, perhaps, a minimum of its own.
Values simple_values(WeightFormat kind, const uint8_t* from) {
  switch (kind) {
    case WeightFormat::q4_0:
      return nibbles_of(from + 2, nullptr, 0);
    case WeightFormat::q4_1:
      return nibbles_of(from + 4, nullptr, 0);
    case WeightFormat::q5_0:
      return nibbles_of(from + 6, from + 2, 16);
    case WeightFormat::q5_1:
      return nibbles_of(from + 8, from + 4, 0);
    default: {
      Values values;
      std::memcpy(values.stored, from + 2, block_values);
      return values;
    }
  }
}

// Values [32 * index, ...) of a super-block of 256.
Values super_values(WeightFormat kind, const uint8_t* from, int64_t index) {
  Values values;
  for (int64_t k = 0; k < block_values; ++k) {
    int value;
    if (kind == WeightFormat::q6_k) {
      const int64_t half = index / 4, quarter = index % 4;
      const int low = from[half * 64 + quarter % 2 * 32 + k] >> (quarter / 2 * 4) & 15;
      value = (low | (from[128 + half * 32 + k] >> (2 * quarter) & 3) << 4) - 32;
    } else {
      const uint8_t* nibbles = from + (kind == WeightFormat::q5_k ? 48 : 16);
      value = nibbles[index / 2 * 32 + k] >> (index % 2 * 4) & 15;
      if (kind == WeightFormat::q5_k) value |= (from[16 + k] >> index & 1) << 4;
    }
    values.stored[k] = static_cast<uint8_t>(value);
  }
  return values;
}

// Scale and minimum, 6 bits each, of eight parts of a super-block in twelve bytes.
void six_bit_scales(const uint8_t* packed, int64_t index, uint8_t& scale, uint8_t& minimum) {
  if (index < 4) {
    scale = packed[index] & 63;
    minimum = packed[4 + index] & 63;
  } else {
    scale = static_cast<uint8_t>((packed[4 + index] & 15) | (packed[index - 4] >> 2 & 0x30));
    minimum = static_cast<uint8_t>(packed[4 + index] >> 4 | (packed[index] >> 2 & 0x30));
  }
}

// Bytes of a block in the file: of 32 values, or of 256 in the super-blocks.
int64_t source_bytes(WeightFormat kind) {
  switch (kind) {
    case WeightFormat::q4_0:
      return 18;
    case WeightFormat::q4_1:
      return 20;
    case WeightFormat::q5_0:
      return 22;
    case WeightFormat::q5_1:
      return 24;
    case WeightFormat::q4_k:
      return 144;
    case WeightFormat::q5_k:
      return 176;
    case WeightFormat::q6_k:
      return 210;
    default:
      return 34;
  }
}

template <WeightFormat format>
void pack_row(WeightFormat kind, uint8_t* panel, int64_t column, int64_t blocks, const uint8_t* from) {
  // The walk is over memory that is ours to write.
  BlockWalk<format> walk(panel);
  for (int64_t index = 0; index < blocks; ++index, walk.next()) {
    auto* block = const_cast<uint8_t*>(walk.block);
    uint8_t* scales = block + values_bytes(format);
    if constexpr (has_header(format)) {
      const int64_t part = index % super_blocks;
      auto* header = const_cast<uint8_t*>(walk.header);
      put_values<format>(block, column, super_values(kind, from, part));
      if constexpr (format == WeightFormat::q6_k) {
        std::memcpy(header + column * 2, from + 208, 2);
        for (int64_t half = 0; half < 2; ++half) scales[half * 32 + column] = from[192 + part * 2 + half];
      } else {
        std::memcpy(header + column * 2, from, 2);
        std::memcpy(header + 64 + column * 2, from + 2, 2);
        six_bit_scales(from + 4, part, scales[column], scales[32 + column]);
      }
      if (part + 1 == super_blocks) from += source_bytes(kind);
    } else {
      put_values<format>(block, column, simple_values(kind, from));
      std::memcpy(scales + column * 2, from, 2);
      if (has_minimum(format)) std::memcpy(scales + 64 + column * 2, from + 2, 2);
      from += source_bytes(kind);
    }
  }
}

}  // namespace

void pack_blocks(PackedWeight& weight, WeightFormat kind, const uint8_t* rows, int64_t row_begin, int64_t row_end) {
  if (weight.format == WeightFormat::mixed) {
    auto part = weight.parts.begin();
    for (; row_begin >= part->n; ++part) {
      row_begin -= part->n;
      row_end -= part->n;
    }
    assert(row_end <= part->n);  // a tensor's rows have one format
    return pack_blocks(*part, kind, rows, row_begin, row_end);
  }
  assert(kind >= WeightFormat::q4_0 && kind != WeightFormat::q8_minimum && kind != WeightFormat::mixed);
  const int64_t blocks = weight.k / block_values;
  const int64_t row_bytes = blocks / (header_bytes(kind) == 0 ? 1 : super_blocks) * source_bytes(kind);
  if (kind != weight.format) {
    PackedWeight one(kind, 1, weight.k);
    std::vector<float> values(weight.k);
    for (int64_t row = row_begin; row < row_end; ++row, rows += row_bytes) {
      pack_blocks(one, kind, rows, 0, 1);
      unpack_blocks_row(one, 0, values.data());
      pack_f32(weight, values.data(), row, row + 1);
    }
    return;
  }
  with_block_format(weight.format, [&](auto format) {
    for (int64_t row = row_begin; row < row_end; ++row, rows += row_bytes) {
      uint8_t* panel = weight.data.as<uint8_t>() + row / panel_columns * weight.panel_bytes;
      pack_row<decltype(format)::value>(kind, panel, row % panel_columns, blocks, rows);
    }
  });
}

void unpack_blocks_row(const PackedWeight& weight, int64_t row, float* into) {
  const int64_t column = row % panel_columns;
  with_block_format(weight.format, [&](auto constant) {
    constexpr WeightFormat format = decltype(constant)::value;
    BlockWalk<format> walk(weight.data.as<uint8_t>() + row / panel_columns * weight.panel_bytes);
    for (int64_t block = 0; block < weight.k / block_values; ++block, walk.next()) {
      float minimum = 0;
      if constexpr (has_minimum(format)) minimum = minimum_at(walk, column);
      for (int64_t part = 0; part < block_values; part += scale_values(format)) {
        const float scale = scale_at(walk, column, part);
        for (int64_t k = part; k < part + scale_values(format); ++k) {
          const float value = static_cast<float>(value_at(walk, column, k)) * scale;
          *into++ = has_minimum(format) ? value + minimum : value;
        }
      }
    }
  });
}

}  // namespace trivet
