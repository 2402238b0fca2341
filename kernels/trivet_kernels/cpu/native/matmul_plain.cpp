// Products and preparation of activations without any instruction set: the reference of the others, and the path of a
// processor that has none of them.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "bfloat16.h"
#include "matmul_kernels.h"
#include "quantise.h"

namespace trivet {
namespace {

void put(const MatmulTask& task, int64_t row, int64_t panel, const float* values) {
  float* out = task.out_at(row, panel);
  for (int64_t i = 0; i < task.columns(panel); ++i) {
    out[i] = task.output == Output::add ? out[i] + values[i] : values[i];
  }
}

template <typename Row>
void each_row_of_each_panel(const MatmulTask& task, Row row_times_panel) {
  for (int64_t panel = task.range.panel_begin; panel < task.range.panel_end; ++panel) {
    for (int64_t row = task.range.row_begin; row < task.range.row_end; ++row) {
      float values[panel_columns] = {};
      row_times_panel(row, task.panel(panel), values);
      put(task, row, panel, values);
    }
  }
}

// The four bytes that a column has in one group of k (see matmul_pack.cpp).
const uint8_t* group_of(const uint8_t* panel, int64_t step, int64_t column, int64_t group) {
  return panel + step * step_bytes + column / 16 * (step_bytes / 2) + group * line_bytes + column % 16 * 4;
}

// Columns [begin, end) of a row; `from` points at the first of them.
void prepare_f32_row(Activations& into, const float* from, int64_t row, int64_t begin, int64_t end) {
  for (int64_t column = begin; column < end; column += 16) {
    std::memcpy(into.line(row, column / 16), from + column - begin, std::min<int64_t>(16, end - column) * 4);
  }
}

void prepare_bf16_row(Activations& into, const float* from, int64_t row, int64_t begin, int64_t end) {
  for (int64_t column = begin; column < end; ++column) {
    reinterpret_cast<uint16_t*>(into.line(row, column / 32))[column % 32] = to_bfloat16(from[column - begin]);
  }
}

}  // namespace

void matmul_f32_plain(const MatmulTask& task) {
  each_row_of_each_panel(task, [&](int64_t row, const uint8_t* panel, float* sums) {
    const auto* weights = reinterpret_cast<const float*>(panel);
    for (int64_t step = 0; step < task.weight.steps; ++step) {
      const auto* x = reinterpret_cast<const float*>(task.x.line(row, step));
      for (int64_t i = 0; i < 16; ++i, weights += panel_columns) {
        for (int64_t column = 0; column < panel_columns; ++column) sums[column] += x[i] * weights[column];
      }
    }
  });
}

void matmul_bf16_plain(const MatmulTask& task) {
  each_row_of_each_panel(task, [&](int64_t row, const uint8_t* panel, float* sums) {
    for (int64_t step = 0; step < task.weight.steps; ++step) {
      const auto* x = reinterpret_cast<const uint16_t*>(task.x.line(row, step));
      for (int64_t group = 0; group < 16; ++group) {
        const float even = from_bfloat16(x[2 * group]), odd = from_bfloat16(x[2 * group + 1]);
        for (int64_t column = 0; column < panel_columns; ++column) {
          uint16_t pair[2];
          std::memcpy(pair, group_of(panel, step, column, group), 4);
          sums[column] += even * from_bfloat16(pair[0]) + odd * from_bfloat16(pair[1]);
        }
      }
    }
  });
}

void matmul_i8_plain(const MatmulTask& task) {
  const auto* row_scales = task.x.scales.as<float>();
  each_row_of_each_panel(task, [&](int64_t row, const uint8_t* panel, float* values) {
    int32_t sums[panel_columns] = {};
    for (int64_t step = 0; step < task.weight.steps; ++step) {
      const auto* x = reinterpret_cast<const int8_t*>(task.x.line(row, step));
      for (int64_t group = 0; group < 16; ++group) {
        for (int64_t column = 0; column < panel_columns; ++column) {
          const auto* weights = reinterpret_cast<const int8_t*>(group_of(panel, step, column, group));
          for (int64_t i = 0; i < 4; ++i) sums[column] += x[group * 4 + i] * weights[i];
        }
      }
    }
    const auto* column_scales = reinterpret_cast<const float*>(panel + task.weight.steps * step_bytes);
    for (int64_t i = 0; i < panel_columns; ++i) {
      values[i] = static_cast<float>(sums[i]) * column_scales[i] * row_scales[row];
    }
  });
}

void prepare_f32_plain(Activations& into, const float* x, int64_t ldx, int64_t row_begin, int64_t row_end) {
  for (int64_t row = row_begin; row < row_end; ++row) prepare_f32_row(into, x + row * ldx, row, 0, into.k);
}

void prepare_f32_columns_plain(Activations& into, const float* x, int64_t ldx, const ColumnRange& range) {
  for (int64_t row = range.row_begin; row < range.row_end; ++row) {
    prepare_f32_row(into, x + row * ldx, row, range.column_begin, range.column_end);
  }
}

void prepare_bf16_plain(Activations& into, const float* x, int64_t ldx, int64_t row_begin, int64_t row_end) {
  for (int64_t row = row_begin; row < row_end; ++row) prepare_bf16_row(into, x + row * ldx, row, 0, into.k);
}

void prepare_bf16_columns_plain(Activations& into, const float* x, int64_t ldx, const ColumnRange& range) {
  for (int64_t row = range.row_begin; row < range.row_end; ++row) {
    prepare_bf16_row(into, x + row * ldx, row, range.column_begin, range.column_end);
  }
}

void prepare_i8_plain(Activations& into, const float* x, int64_t ldx, int64_t row_begin, int64_t row_end) {
  for (int64_t row = row_begin; row < row_end; ++row) {
    const float* from = x + row * ldx;
    const QuantisationScale scale = scale_for(largest_magnitude_bits(from, into.k));
    into.scales.as<float>()[row] = scale.scale;
    for (int64_t step = 0; step < into.steps; ++step) {
      const int64_t values = std::min<int64_t>(64, into.k - step * 64);
      auto* to = reinterpret_cast<int8_t*>(into.line(row, step));
      for (int64_t i = 0; i < values; ++i) to[i] = static_cast<int8_t>(quantise(from[step * 64 + i], scale));
    }
  }
}

}  // namespace trivet
