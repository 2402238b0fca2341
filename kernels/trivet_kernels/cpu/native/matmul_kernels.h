// What the files of the instruction sets offer to the dispatch in matmul.cpp, and the task that they share.
#pragma once

#include "matmul.h"

namespace trivet {

// Members are always inlined: a copy compiled for one instruction set must not be called from another file.
struct MatmulTask {
  const PackedWeight& weight;
  const Activations& x;
  MatmulRange range;
  float* out;
  int64_t ldo;
  Output output;
  const SumsTaker* taker = nullptr;  // takes what is otherwise put out

  [[gnu::always_inline]] const uint8_t* panel(int64_t index) const {
    return weight.data.as<uint8_t>() + index * weight.panel_bytes;
  }
  [[gnu::always_inline]] float* out_at(int64_t row, int64_t panel) const {
    return out + row * ldo + panel * panel_columns;
  }
  // Columns of this panel that exist: 32 but for the last.
  [[gnu::always_inline]] int64_t columns(int64_t panel) const {
    const int64_t left = weight.n - panel * panel_columns;
    return left < panel_columns ? left : panel_columns;
  }
};

// Bytes of one step of a panel in the formats without blocks: 32 columns times one line.
constexpr int64_t step_bytes = panel_columns * line_bytes;
// After the steps of an i8 panel: 32 float scales, then 32 int32 sums of each column's values.
constexpr int64_t i8_tail_bytes = 2 * panel_columns * 4;
constexpr int64_t block_values = 32;
constexpr int64_t super_blocks = 8;  // blocks that share a header
// Bytes of a block of a panel, and of the header before every eighth block (matmul_blocks.h).
constexpr int64_t block_bytes(WeightFormat format) {
  switch (format) {
    case WeightFormat::q4_0:
    case WeightFormat::q4_k:
      return 512 + 64;
    case WeightFormat::q4_1:
      return 512 + 128;
    case WeightFormat::q5_1:
    case WeightFormat::q8_minimum:
      return 1024 + 128;
    default:
      return 1024 + 64;
  }
}
constexpr int64_t header_bytes(WeightFormat format) {
  return format == WeightFormat::q6_k ? 64 : format == WeightFormat::q4_k || format == WeightFormat::q5_k ? 128 : 0;
}

void quantise_row(PackedWeight& weight, int64_t row, const float* values);  // q8_minimum
void unpack_blocks_row(const PackedWeight& weight, int64_t row, float* into);

// Memory of the calling thread, on a 64-byte line, until the next call; grows on the first use of a larger size.
int8_t* thread_scratch(int64_t bytes);

using Matmul = void (*)(const MatmulTask&);
using Prepare = void (*)(Activations&, const float* x, int64_t ldx, int64_t row_begin, int64_t row_end);


void matmul_f32_plain(const MatmulTask&);
void matmul_bf16_plain(const MatmulTask&);
void matmul_i8_plain(const MatmulTask&);
void matmul_blocks_plain(const MatmulTask&);
void prepare_f32_plain(Activations&, const float*, int64_t, int64_t, int64_t);
void prepare_bf16_plain(Activations&, const float*, int64_t, int64_t, int64_t);
void prepare_i8_plain(Activations&, const float*, int64_t, int64_t, int64_t);
void prepare_blocks_plain(Activations&, const float*, int64_t, int64_t, int64_t);
void prepare_blocks_columns_plain(Activations&, const float*, int64_t, const ColumnRange&);
void prepare_f32_columns_plain(Activations&, const float*, int64_t, const ColumnRange&);
void prepare_bf16_columns_plain(Activations&, const float*, int64_t, const ColumnRange&);

#if defined(__x86_64__)
void matmul_f32_avx2(const MatmulTask&);
void matmul_bf16_avx2(const MatmulTask&);
void matmul_i8_avx2(const MatmulTask&);
void matmul_blocks_avx2(const MatmulTask&);
void prepare_blocks_avx2(Activations&, const float*, int64_t, int64_t, int64_t);
void prepare_blocks_columns_avx2(Activations&, const float*, int64_t, const ColumnRange&);

void matmul_f32_avx512(const MatmulTask&);
void matmul_bf16_avx512(const MatmulTask&);    // needs AVX512-BF16
void matmul_i8_avx512(const MatmulTask&);      // needs AVX512-VNNI
void matmul_blocks_avx512(const MatmulTask&);  // needs AVX512-VNNI
void prepare_bf16_avx512(Activations&, const float*, int64_t, int64_t, int64_t);
void prepare_bf16_columns_avx512(Activations&, const float*, int64_t, const ColumnRange&);
void prepare_i8_avx512(Activations&, const float*, int64_t, int64_t, int64_t);  // values + 128, unsigned
void prepare_i8_amx(Activations&, const float*, int64_t, int64_t, int64_t);
void prepare_blocks_avx512(Activations&, const float*, int64_t, int64_t, int64_t);
void prepare_blocks_columns_avx512(Activations&, const float*, int64_t, const ColumnRange&);

void matmul_bf16_amx(const MatmulTask&);
void matmul_i8_amx(const MatmulTask&);
void matmul_blocks_amx(const MatmulTask&);
#endif

}  // namespace trivet
