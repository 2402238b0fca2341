// Products with weights in GGUF blocks, and their activations, without any instruction set.
#include <cstring>

#include "matmul_blocks.h"
#include "quantise.h"

namespace trivet {
namespace {

float half_at(const uint8_t* at) {
  _Float16 value;
  std::memcpy(&value, at, 2);
  return static_cast<float>(value);
}

// Value i of group `group` (k = 4 * group + i) as it enters the integer dot product.
int weight_at(WeightFormat format, const uint8_t* block, int64_t column, int64_t group, int64_t i) {
  const int64_t at = group * line_bytes + column % 16 * 4 + i;
  if (format == WeightFormat::q8_0) return static_cast<int8_t>(block[column / 16 * 512 + at]);
  const int nibble = column < 16 ? block[at] & 15 : block[at] >> 4;
  return format == WeightFormat::q4_0 ? nibble - 8 : nibble;
}

void row_times_panel(const MatmulTask& task, int64_t row, const uint8_t* block, float* sums) {
  const WeightFormat format = task.weight.format;
  for (int64_t index = 0; index < task.weight.k / block_values; ++index, block += block_bytes(format)) {
    const auto* x = reinterpret_cast<const int8_t*>(block_of(task.x, row, index));
    const int64_t place = scale_index(task.x, row, index);
    const float scale = task.x.scales.as<float>()[place];
    const float row_sum = scale * static_cast<float>(task.x.sums.as<int32_t>()[place]);
    const uint8_t* scales = block + values_bytes(format);
    for (int64_t column = 0; column < panel_columns; ++column) {
      int dot = 0;
      for (int64_t group = 0; group < line_groups; ++group) {
        for (int64_t i = 0; i < 4; ++i) dot += x[group * 4 + i] * weight_at(format, block, column, group, i);
      }
      sums[column] += static_cast<float>(dot) * (half_at(scales + column * 2) * scale);
      if (format == WeightFormat::q4_1) sums[column] += half_at(scales + 64 + column * 2) * row_sum;
    }
  }
}

}  // namespace

void matmul_blocks_plain(const MatmulTask& task) {
  for (int64_t panel = task.range.panel_begin; panel < task.range.panel_end; ++panel) {
    for (int64_t row = task.range.row_begin; row < task.range.row_end; ++row) {
      float values[panel_columns] = {};
      row_times_panel(task, row, task.panel(panel), values);
      float* out = task.out_at(row, panel);
      for (int64_t i = 0; i < task.columns(panel); ++i) {
        out[i] = task.output == Output::add ? out[i] + values[i] : values[i];
      }
    }
  }
}

void prepare_blocks_plain(Activations& into, const float* x, int64_t ldx, int64_t row_begin, int64_t row_end) {
  for (int64_t row = row_begin; row < row_end; ++row) {
    for (int64_t block = 0; block < into.k / block_values; ++block) {
      const float* from = x + row * ldx + block * block_values;
      const QuantisationScale scale = scale_for(largest_magnitude_bits(from, block_values));
      auto* to = reinterpret_cast<int8_t*>(into.line(row, block / 2) + block % 2 * 32);
      int32_t sum = 0;
      for (int64_t i = 0; i < block_values; ++i) sum += to[i] = quantise(from[i], scale);
      const int64_t place = scale_index(into, row, block);
      into.scales.as<float>()[place] = scale.scale;
      into.sums.as<int32_t>()[place] = sum;
    }
  }
}

}  // namespace trivet
