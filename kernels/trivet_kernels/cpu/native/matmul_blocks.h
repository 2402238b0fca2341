// Layout of weights in blocks of 32 inside a panel, and of the activations that go with them.
//
// A block of a panel covers 32 values of k by 32 columns:
//   4 bits: 8 lines, line g with the nibbles of k = 4g..4g+3: the low ones of column c, the high ones of column c + 16,
//           at byte 4c
//   8 bits: two tiles of 16 columns, 8 lines each, line g with k = 4g..4g+3 of column c at byte 4c
// and behind them the scales of the 32 columns:
//   q4_0, q8_0:        d in half precision
//   q4_1, q8_minimum:  d, then m, in half precision
//   q4_k, q5_k:        scales, then minimums, in 6 bits; every eighth block has d and dmin, half precision, before it
//   q6_k:              int8 scales of the values 0-15, then of 16-31; every eighth block has d before it
//
// Activations are whole numbers of 12 bits with one scale per block, x = scale * (16 * upper + lower). A line has the
// 32 values of a block: on AVX-512 and AMX the upper parts, then the lower ones, int8; elsewhere int16, of each four
// values (0, 1, 2, 3) in the order (0, 2, 1, 3). Twelve bits cost an AMX tile no more than eight, where weights have
// four: a tile takes 64 values of k, the upper parts meet 16 * w, the lower ones w.
//
// Every kernel does, per output, scale and in the order of k,
//   sum = fma(float(exact integer dot product), d * scale, sum), then sum = fma(m, scale * float(row sum), sum)
// so tiles and vectors of any width may be mixed freely without a change of bits.
#pragma once

#include <type_traits>

#include "matmul_kernels.h"

namespace trivet {
namespace {  // each instruction set's file has its own copy

constexpr int64_t line_groups = 8;  // groups of four values in a block

constexpr bool has_nibbles(WeightFormat format) {
  return format == WeightFormat::q4_0 || format == WeightFormat::q4_1 || format == WeightFormat::q4_k;
}
constexpr bool has_minimum(WeightFormat format) {
  return format == WeightFormat::q4_1 || format == WeightFormat::q8_minimum || format == WeightFormat::q4_k ||
         format == WeightFormat::q5_k;
}
constexpr bool has_header(WeightFormat format) { return header_bytes(format) != 0; }
// How many values of k share a scale.
constexpr int64_t scale_values(WeightFormat format) { return format == WeightFormat::q6_k ? 16 : 32; }
constexpr int64_t values_bytes(WeightFormat format) { return has_nibbles(format) ? 512 : 1024; }
// What the stored value is above the value that is multiplied.
constexpr int stored_offset(WeightFormat format) { return format == WeightFormat::q4_0 ? 8 : 0; }

// Calls `work` with the format as a type, so that a template can be chosen by it; with the one that it is kept as.
template <typename Work>
void with_block_format(WeightFormat format, const Work& work) {
  using F = WeightFormat;
  switch (format) {
    case F::q4_0:
      return work(std::integral_constant<F, F::q4_0>());
    case F::q4_1:
      return work(std::integral_constant<F, F::q4_1>());
    case F::q4_k:
      return work(std::integral_constant<F, F::q4_k>());
    case F::q5_k:
      return work(std::integral_constant<F, F::q5_k>());
    case F::q6_k:
      return work(std::integral_constant<F, F::q6_k>());
    case F::q5_1:
    case F::q8_minimum:
      return work(std::integral_constant<F, F::q8_minimum>());
    default:
      return work(std::integral_constant<F, F::q8_0>());  // q5_0 too
  }
}

// A walk over the blocks of a panel.
template <WeightFormat format>
struct BlockWalk {
  const uint8_t* header;
  const uint8_t* block;
  int64_t index = 0;

  explicit BlockWalk(const uint8_t* panel) : header(panel), block(panel + header_bytes(format)) {}
  const uint8_t* scales() const { return block + values_bytes(format); }
  void next() {
    block += block_bytes(format);
    if (has_header(format) && ++index % super_blocks == 0) {
      header = block;
      block += header_bytes(format);
    }
  }
};

// Place of a row's scale and sum for one block: those of 16 rows lie together.
[[gnu::always_inline]] inline int64_t scale_index(const Activations& x, int64_t row, int64_t block) {
  return (row / row_block * x.steps + block) * row_block + row % row_block;
}

}  // namespace
}  // namespace trivet
