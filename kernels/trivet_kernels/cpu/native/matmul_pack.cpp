// Packing of weights into panels: once at the start, so written for clearness and compiled for any processor.
#include <cassert>
#include <cstring>
#include <vector>

#include "bfloat16.h"
#include "matmul_kernels.h"
#include "quantise.h"

namespace trivet {
namespace {

uint8_t* panel_of(PackedWeight& weight, int64_t row) {
  return weight.data.as<uint8_t>() + row / panel_columns * weight.panel_bytes;
}

// f32: [k][32 columns].
void pack_row_f32(uint8_t* panel, int64_t column, const float* row, int64_t k) {
  auto* to = reinterpret_cast<float*>(panel) + column;
  for (int64_t i = 0; i < k; ++i) to[i * panel_columns] = row[i];
}

// Formats whose instructions take four bytes of k from each column: [step][tile of 16 columns][16 groups of k][16
// columns][4 bytes].
template <typename Byte>
Byte* group_of(Byte* panel, int64_t column, int64_t group) {
  const int64_t step = group / 16;
  return panel + step * step_bytes + column / 16 * (step_bytes / 2) + group % 16 * line_bytes + column % 16 * 4;
}

void pack_row_bf16(uint8_t* panel, int64_t column, const float* row, int64_t k) {
  for (int64_t i = 0; i < k; i += 2) {
    const uint16_t pair[2] = {to_bfloat16(row[i]), i + 1 < k ? to_bfloat16(row[i + 1]) : uint16_t{0}};
    std::memcpy(group_of(panel, column, i / 2), pair, 4);
  }
}

void pack_row_i8(uint8_t* panel, int64_t column, const float* row, int64_t k, int64_t steps) {
  const QuantisationScale scale = scale_for(largest_magnitude_bits(row, k));
  int32_t sum = 0;
  for (int64_t i = 0; i < k; ++i) {
    const auto value = static_cast<int8_t>(quantise(row[i], scale));
    group_of(panel, column, i / 4)[i % 4] = static_cast<uint8_t>(value);
    sum += value;
  }
  uint8_t* tail = panel + steps * step_bytes;
  reinterpret_cast<float*>(tail)[column] = scale.scale;
  reinterpret_cast<int32_t*>(tail + panel_columns * 4)[column] = sum;
}

}  // namespace

void pack_f32(PackedWeight& weight, const float* rows, int64_t row_begin, int64_t row_end) {
  for (int64_t row = row_begin; row < row_end; ++row, rows += weight.k) {
    uint8_t* panel = panel_of(weight, weight.place(row));
    const int64_t column = weight.place(row) % panel_columns;
    switch (weight.format) {
      case WeightFormat::f32: pack_row_f32(panel, column, rows, weight.k); break;
      case WeightFormat::bf16: pack_row_bf16(panel, column, rows, weight.k); break;
      case WeightFormat::i8: pack_row_i8(panel, column, rows, weight.k, weight.steps); break;
      case WeightFormat::q8_minimum: quantise_row(weight, row, rows); break;
      default: assert(false && "the other block formats are packed from their own blocks");
    }
  }
}

void pack_bf16(PackedWeight& weight, const uint16_t* rows, int64_t row_begin, int64_t row_end) {
  std::vector<float> row(weight.k);
  for (int64_t index = row_begin; index < row_end; ++index, rows += weight.k) {
    for (int64_t i = 0; i < weight.k; ++i) row[i] = from_bfloat16(rows[i]);
    pack_f32(weight, row.data(), index, index + 1);
  }
}

void unpack_row(const PackedWeight& weight, int64_t row, float* into) {
  if (weight.format >= WeightFormat::q4_0) return unpack_blocks_row(weight, row, into);
  const int64_t column = weight.place(row) % panel_columns;
  const uint8_t* panel = weight.data.as<uint8_t>() + weight.place(row) / panel_columns * weight.panel_bytes;
  const auto* scales = reinterpret_cast<const float*>(panel + weight.steps * step_bytes);
  for (int64_t i = 0; i < weight.k; ++i) {
    switch (weight.format) {
      case WeightFormat::f32: into[i] = reinterpret_cast<const float*>(panel)[i * panel_columns + column]; break;
      case WeightFormat::bf16: {
        uint16_t value;
        std::memcpy(&value, group_of(panel, column, i / 2) + i % 2 * 2, 2);
        into[i] = from_bfloat16(value);
        break;
      }
      case WeightFormat::i8:
        into[i] = static_cast<float>(static_cast<int8_t>(group_of(panel, column, i / 4)[i % 4])) * scales[column];
        break;
      default: break;
    }
  }
}

}  // namespace trivet
