// Products with weights in blocks, and their activations, without any instruction set.
#include <cstring>

#include "block_values.h"
#include "quantise.h"

namespace trivet {
namespace {

template <WeightFormat format>
void row_times_panel(const MatmulTask& task, int64_t row, const uint8_t* panel, float* sums) {
  constexpr int64_t count = scale_values(format);
  BlockWalk<format> walk(panel);
  for (int64_t block = 0; block < task.x.steps; ++block, walk.next()) {
    const auto* x = reinterpret_cast<const int16_t*>(task.x.line(row, block));
    const int64_t place = scale_index(task.x, row, block);
    const float scale = task.x.scales.as<float>()[place];
    const float row_sum = scale * static_cast<float>(task.x.sums.as<int32_t>()[place]);
    for (int64_t column = 0; column < panel_columns; ++column) {
      for (int64_t begin = 0; begin < block_values; begin += count) {
        int dot = 0;
        for (int64_t k = begin; k < begin + count; ++k) dot += x[pair_order(k)] * value_at(walk, column, k);
        sums[column] += static_cast<float>(dot) * (scale_at(walk, column, begin) * scale);
      }
      if (has_minimum(format)) sums[column] += minimum_at(walk, column) * row_sum;
    }
  }
}

template <WeightFormat format>
void matmul_format(const MatmulTask& task) {
  for (int64_t panel = task.range.panel_begin; panel < task.range.panel_end; ++panel) {
    for (int64_t row = task.range.row_begin; row < task.range.row_end; ++row) {
      float values[panel_columns] = {};
      row_times_panel<format>(task, row, task.panel(panel), values);
      float* out = task.out_at(row, panel);
      for (int64_t i = 0; i < task.columns(panel); ++i) {
        out[i] = task.output == Output::add ? out[i] + values[i] : values[i];
      }
    }
  }
}

}  // namespace

void matmul_blocks_plain(const MatmulTask& task) {
  with_block_format(task.weight.format, [&](auto format) { matmul_format<decltype(format)::value>(task); });
}

namespace {

// Rows and blocks of activations; x points at row 0 of the first block.
struct BlockRange {
  int64_t row_begin, row_end, block_begin, block_end;
};

void prepare_range(Activations& into, const float* x, int64_t ldx, const BlockRange& range) {
  for (int64_t row = range.row_begin; row < range.row_end; ++row) {
    for (int64_t block = range.block_begin; block < range.block_end; ++block) {
      const float* from = x + row * ldx + (block - range.block_begin) * block_values;
      const QuantisationScale scale = scale_for(largest_magnitude_bits(from, block_values), block_levels);
      auto* to = reinterpret_cast<int16_t*>(into.line(row, block));
      int32_t sum = 0;
      for (int64_t i = 0; i < block_values; ++i) {
        const int32_t value = quantise(from[i], scale);
        to[pair_order(i)] = static_cast<int16_t>(value);
        sum += value;
      }
      const int64_t place = scale_index(into, row, block);
      into.scales.as<float>()[place] = scale.scale;
      into.sums.as<int32_t>()[place] = sum;
    }
  }
}

}  // namespace

void prepare_blocks_plain(Activations& into, const float* x, int64_t ldx, int64_t row_begin, int64_t row_end) {
  prepare_range(into, x, ldx, {row_begin, row_end, 0, into.steps});
}

void prepare_blocks_columns_plain(Activations& into, const float* x, int64_t ldx, const ColumnRange& range) {
  prepare_range(into, x, ldx,
                {range.row_begin, range.row_end, range.column_begin / block_values, range.column_end / block_values});
}

}  // namespace trivet
