// Products of packed weights, y = x · wᵀ: the linear layers of a model on a CPU.
//
// A weight [n, k] is packed once into panels of 32 output columns that stream contiguously. Activations are converted
// once per layer into 64-byte lines (`prepare`), then any number of threads multiply disjoint ranges of panels and
// rows. Nothing here starts a thread or allocates after the buffers are made.
//
// Batch invariance: the bits of an output depend on its activation row and its weights only. Each is summed over k in
// one order, by one kind of instruction, whatever the number of rows, the row's place and the split over threads.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "aligned_buffer.h"

namespace trivet {

constexpr int64_t panel_columns = 32;
constexpr int64_t row_block = 16;   // rows whose lines lie together: the height of an AMX tile
constexpr int64_t line_bytes = 64;  // of one row: 16 f32, 32 bf16 or 64 int8 values

enum class WeightFormat {
  f32,
  bf16,  // products of bf16 pairs, summed in float32
  i8,    // one symmetric scale per output column; activations get one per row; summed exactly in int32
  // Blocks of 32 values, from here on: a file's own, or made of floats. What a block stands for is exact; activations
  // get one scale and 12 bits a block.
  q4_0,        // (q - 8) · d
  q4_1,        // q · d + m
  q8_0,        // int8 · d
  q5_0,        // (q - 16) · d, kept as q8_0
  q5_1,        // q · d + m, kept as q8_minimum
  q4_k,        // q · d - m, scales and minimums of super-blocks in 6 bits
  q5_k,        // the same with 5 bits, kept in 8
  q6_k,        // (q - 32) · d, one d for 16 values, kept in 8 bits
  q8_minimum,  // int8 · d + m, out of floats
  mixed,       // rows of several block formats, see PackedWeight::add_rows
};

bool is_block_format(WeightFormat format);

struct PackedWeight {
  PackedWeight() = default;
  PackedWeight(WeightFormat format, int64_t n, int64_t k);  // zeros, to be filled by the functions below
  // The same without memory of its own: `data` is to be set, to zeros of `bytes()` at first.
  static PackedWeight without_memory(WeightFormat format, int64_t n, int64_t k);
  int64_t bytes() const { return panels * panel_bytes; }
  // Where a row lies among the columns of the panels.
  int64_t place(int64_t row) const {
    if (!halves_in_turn) return row;
    const int64_t in_half = row % (n / 2);
    return in_half / 16 * panel_columns + row / (n / 2) * 16 + in_half % 16;
  }
  // The next rows of a mixed weight: multiples of 32, in a block format of their own. All of them must be added.
  void add_rows(WeightFormat format, int64_t rows);

  WeightFormat format = WeightFormat::f32;
  int64_t n = 0, k = 0;
  int64_t panels = 0;       // n / 32, rounded up; the columns beyond n are zeros and never written out
  int64_t steps = 0;        // lines of a row that cover k; values beyond k are zeros
  int64_t panel_bytes = 0;  // panels follow each other at this distance; of a mixed weight the greatest of its parts
  // Sixteen rows of the first half, then the same of the second, so that a panel has both of what belongs together; not
  // of blocks. Columns of products come in this order.
  bool halves_in_turn = false;
  AlignedBuffer data;
  std::vector<PackedWeight> parts;  // of a mixed weight, which has no data of its own
};

// Fill rows [row_begin, row_end) of the weight (its output columns) from rows [rows, k] that start at row_begin.
// Disjoint ranges may be packed by different threads if they share no panel.
// f32, bf16, i8, q8_minimum:
void pack_f32(PackedWeight& weight, const float* rows, int64_t row_begin, int64_t row_end);
void pack_bf16(PackedWeight& weight, const uint16_t* rows, int64_t row_begin, int64_t row_end);
// From blocks of `kind` as they lie in a GGUF file: taken over without a change of value where that is the weight's own
// format, otherwise as the floats that they stand for.
void pack_blocks(PackedWeight& weight, WeightFormat kind, const uint8_t* rows, int64_t row_begin, int64_t row_end);

// One row of the weight as floats [k], dequantised: an embedding taken from a tied output head.
void unpack_row(const PackedWeight& weight, int64_t row, float* into);

// Activations as the kernels of one format read them: blocks of 16 rows, in each a line of every row per step.
struct Activations {
  Activations() = default;
  Activations(WeightFormat format, int64_t capacity_rows, int64_t k);

  [[gnu::always_inline]] const uint8_t* line(int64_t row, int64_t step) const {
    return lines.as<uint8_t>() + ((row / row_block * steps + step) * row_block + row % row_block) * line_bytes;
  }
  [[gnu::always_inline]] uint8_t* line(int64_t row, int64_t step) {
    return const_cast<uint8_t*>(std::as_const(*this).line(row, step));
  }

  WeightFormat format = WeightFormat::f32;
  int64_t capacity_rows = 0, k = 0, steps = 0;
  AlignedBuffer lines;
  AlignedBuffer scales;  // float: i8 [rows]; block formats [rows, steps]
  AlignedBuffer sums;    // int32: block formats [rows, steps], the sum of each block's integers
};

// Convert rows [row_begin, row_end) of x (x points at row 0, row stride ldx) into the same rows of `into`. A row with
// NaN or infinity makes that row of the product NaN, and no other. Rows may be prepared by different threads.
void prepare(Activations& into, const float* x, int64_t ldx, int64_t row_begin, int64_t row_end);

// Columns [column_begin, column_end) of rows [row_begin, row_end).
struct ColumnRange {
  int64_t row_begin, row_end;
  int64_t column_begin, column_end;
};
// The same for some columns alone, multiples of 32 but for the last, or (of a format without blocks) sixteen of them: x
// points at the first of them in row 0. Null of formats in which a whole row has one scale.
using PrepareColumns = void (*)(Activations& into, const float* x, int64_t ldx, const ColumnRange& range);
PrepareColumns columns_preparer(WeightFormat format);

enum class Output { store, add };  // add: the finished product is added to what is there

// out[row, column] for rows [row_begin, row_end) and the columns of panels [panel_begin, panel_end); out points at
// row 0, column 0, row stride ldo.
// row_begin must be a multiple of 16.
struct MatmulRange {
  int64_t row_begin, row_end;
  int64_t panel_begin, panel_end;
};
void matmul(const PackedWeight& weight, const Activations& x, const MatmulRange& range, float* out, int64_t ldo,
            Output output);

// Who takes finished sums instead of having them stored: up to 32 rows of a panel, [rows][panel_columns], which lie in
// the first cache and are the taker's to write to.
struct SumsTaker {
  void (*take)(void* context, float* sums, int64_t row, int64_t rows, int64_t panel);
  void* context;
};
void matmul(const PackedWeight& weight, const Activations& x, const MatmulRange& range, const SumsTaker& taker);

// A taker that calls `take(sums, row, rows, panel)`, which has to outlive it.
template <typename Take>
SumsTaker taker_of(Take& take) {
  return {[](void* context, float* sums, int64_t row, int64_t rows, int64_t panel) {
            (*static_cast<Take*>(context))(sums, row, rows, panel);
          },
          &take};
}

}  // namespace trivet
