// Layout of weights in GGUF blocks inside a panel, and of the scales of activations that go with them.
//
// A block of a panel covers 32 values of k by 32 columns, in as many bytes as GGUF takes:
//   q4_0, q4_1: 8 lines, line g with the nibbles of k = 4g..4g+3: the low ones of column c, the high ones of column
//               c + 16, at byte 4c; then 32 half-precision d; then, in q4_1, 32 half-precision m
//   q8_0:       two tiles of 16 columns, 8 lines each, line g with k = 4g..4g+3 of column c at byte 4c; then 32 d
//
// All kernels but the plain one do, per output and block in the order of k,
//   sum = fma(float(exact integer dot product), d * scale, sum), and in q4_1 sum = fma(m, scale * float(row sum), sum)
// so vectors and tiles may be mixed freely without a change of bits.
#pragma once

#include "matmul_kernels.h"

namespace trivet {

constexpr int64_t line_groups = 8;  // groups of four values in a block

[[gnu::always_inline]] static inline int64_t values_bytes(WeightFormat format) {
  return format == WeightFormat::q8_0 ? 1024 : 512;
}

// Place of a row's scale and sum for one block: those of 16 rows lie together.
[[gnu::always_inline]] static inline int64_t scale_index(const Activations& x, int64_t row, int64_t block) {
  return (row / row_block * (x.k / block_values) + block) * row_block + row % row_block;
}

// The 32 int8 values of one block of a row.
[[gnu::always_inline]] static inline const uint8_t* block_of(const Activations& x, int64_t row, int64_t block) {
  return x.line(row, block / 2) + block % 2 * 32;
}

}  // namespace trivet
