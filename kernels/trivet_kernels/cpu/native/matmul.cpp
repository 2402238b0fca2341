// Sizes of packed weights and activations, and the choice of a kernel for the instruction set in use.
#include "matmul.h"

#include <algorithm>
#include <cassert>
#include <stdexcept>

#include "isa.h"
#include "matmul_kernels.h"

namespace trivet {
namespace {

int64_t divide_up(int64_t value, int64_t divisor) { return (value + divisor - 1) / divisor; }

int64_t values_per_line(WeightFormat format) {
  switch (format) {
    case WeightFormat::f32:
      return 16;
    case WeightFormat::i8:
      return 64;
    default:
      return 32;
  }
}

struct Kernels {
  Matmul matmul;
  Prepare prepare;
  PrepareColumns prepare_columns = nullptr;  // of formats whose columns need nothing of each other
  bool hands_over = false;                   // knows takers of sums
};

// The best kernel of a format at a level. bf16 without AVX512-BF16 and int8 without VNNI take the AVX2 kernels.
Kernels kernels_for(WeightFormat format, Isa isa) {
#if defined(__x86_64__)
  const CpuFeatures& cpu = cpu_features();
  const bool avx512 = isa >= Isa::avx512;
  switch (format) {
    case WeightFormat::f32:
      if (avx512) return {matmul_f32_avx512, prepare_f32_plain, prepare_f32_columns_plain};
      if (isa == Isa::avx2) return {matmul_f32_avx2, prepare_f32_plain, prepare_f32_columns_plain};
      return {matmul_f32_plain, prepare_f32_plain, prepare_f32_columns_plain};
    case WeightFormat::bf16:
      if (isa == Isa::amx) return {matmul_bf16_amx, prepare_bf16_avx512, prepare_bf16_columns_avx512, true};
      if (avx512 && cpu.avx512_bf16) return {matmul_bf16_avx512, prepare_bf16_avx512, prepare_bf16_columns_avx512};
      if (isa >= Isa::avx2) return {matmul_bf16_avx2, prepare_bf16_plain, prepare_bf16_columns_plain};
      return {matmul_bf16_plain, prepare_bf16_plain, prepare_bf16_columns_plain};
    case WeightFormat::i8:
      if (isa == Isa::amx) return {matmul_i8_amx, prepare_i8_amx, nullptr, true};
      if (avx512 && cpu.avx512_vnni) return {matmul_i8_avx512, prepare_i8_avx512};
      if (isa >= Isa::avx2) return {matmul_i8_avx2, prepare_i8_plain};
      return {matmul_i8_plain, prepare_i8_plain};
    default:
      if (isa == Isa::amx) return {matmul_blocks_amx, prepare_blocks_avx512, prepare_blocks_columns_avx512};
      if (avx512 && cpu.avx512_vnni)
        return {matmul_blocks_avx512, prepare_blocks_avx512, prepare_blocks_columns_avx512};
      if (isa >= Isa::avx2) return {matmul_blocks_avx2, prepare_blocks_avx2, prepare_blocks_columns_avx2};
      return {matmul_blocks_plain, prepare_blocks_plain, prepare_blocks_columns_plain};
  }
#else
  switch (format) {
    case WeightFormat::f32:
      return {matmul_f32_plain, prepare_f32_plain, prepare_f32_columns_plain};
    case WeightFormat::bf16:
      return {matmul_bf16_plain, prepare_bf16_plain, prepare_bf16_columns_plain};
    case WeightFormat::i8:
      return {matmul_i8_plain, prepare_i8_plain};
    default:
      return {matmul_blocks_plain, prepare_blocks_plain, prepare_blocks_columns_plain};
  }
#endif
}

void run(const MatmulTask& task) {
  const MatmulRange& range = task.range;
  assert(task.weight.k == task.x.k);
  assert(task.weight.format == task.x.format ||
         (is_block_format(task.weight.format) && is_block_format(task.x.format)));
  assert(range.row_begin % row_block == 0 && range.row_end <= task.x.capacity_rows);
  assert(0 <= range.panel_begin && range.panel_end <= task.weight.panels);
  if (range.row_begin >= range.row_end || range.panel_begin >= range.panel_end) return;
  kernels_for(task.weight.format, isa_in_use()).matmul(task);
}

}  // namespace

bool is_block_format(WeightFormat format) { return format >= WeightFormat::q4_0; }

int8_t* thread_scratch(int64_t bytes) {
  thread_local AlignedBuffer scratch;
  if (scratch.bytes() < bytes) scratch = AlignedBuffer(bytes);
  return scratch.as<int8_t>();
}

PackedWeight::PackedWeight(WeightFormat format, int64_t n, int64_t k) : PackedWeight(without_memory(format, n, k)) {
  if (format != WeightFormat::mixed) data = AlignedBuffer(bytes());
}

PackedWeight PackedWeight::without_memory(WeightFormat format, int64_t n, int64_t k) {
  if (n <= 0 || k <= 0) throw std::invalid_argument("a packed weight needs at least one row and one column");
  PackedWeight weight;
  weight.format = format;
  weight.n = n;
  weight.k = k;
  weight.panels = divide_up(n, panel_columns);
  weight.steps = divide_up(k, values_per_line(format));
  if (format == WeightFormat::mixed) {
    if (n % panel_columns != 0) throw std::invalid_argument("a mixed weight needs a multiple of 32 rows");
    weight.panel_bytes = k / block_values * block_bytes(WeightFormat::q4_0);  // until rows are added
    return weight;
  }
  if (is_block_format(format)) {
    if (k % block_values != 0) throw std::invalid_argument("a weight in blocks of 32 needs a multiple of 32 columns");
    const int64_t blocks = k / block_values, in_super_block = header_bytes(format) == 0 ? 1 : super_blocks;
    if (blocks % in_super_block != 0) throw std::invalid_argument("super-blocks need a multiple of 256 columns");
    weight.panel_bytes = blocks * block_bytes(format) + blocks / in_super_block * header_bytes(format);
  } else {
    weight.panel_bytes = weight.steps * step_bytes + (format == WeightFormat::i8 ? i8_tail_bytes : 0);
  }
  return weight;
}

void PackedWeight::add_rows(WeightFormat part_format, int64_t rows) {
  if (format != WeightFormat::mixed || rows % panel_columns != 0 || !is_block_format(part_format)) {
    throw std::invalid_argument("rows of a mixed weight come in blocks, a multiple of 32 of them");
  }
  parts.emplace_back(part_format, rows, k);
  panel_bytes = std::max(panel_bytes, parts.back().panel_bytes);
}

Activations::Activations(WeightFormat format, int64_t capacity_rows, int64_t k)
    : format(format), capacity_rows(capacity_rows), k(k), steps(divide_up(k, values_per_line(format))) {
  // Kernels read, and drop, up to 32 rows at once.
  const int64_t rows = divide_up(capacity_rows, 2 * row_block) * 2 * row_block;
  lines = AlignedBuffer(rows * steps * line_bytes);
  if (format == WeightFormat::i8) scales = AlignedBuffer(rows * 4);
  if (is_block_format(format)) {
    scales = AlignedBuffer(rows * steps * 4);
    sums = AlignedBuffer(rows * steps * 4);
  }
}

void prepare(Activations& into, const float* x, int64_t ldx, int64_t row_begin, int64_t row_end) {
  assert(0 <= row_begin && row_end <= into.capacity_rows);
  kernels_for(into.format, isa_in_use()).prepare(into, x, ldx, row_begin, row_end);
}

PrepareColumns columns_preparer(WeightFormat format) { return kernels_for(format, isa_in_use()).prepare_columns; }

void matmul(const PackedWeight& weight, const Activations& x, const MatmulRange& range, float* out, int64_t ldo,
            Output output) {
  if (weight.format != WeightFormat::mixed) return run({weight, x, range, out, ldo, output});
  int64_t begin = 0;  // panels before this part
  for (const PackedWeight& part : weight.parts) {
    const int64_t first = std::max(range.panel_begin - begin, int64_t{0});
    const int64_t last = std::min(range.panel_end - begin, part.panels);
    run({part, x, {range.row_begin, range.row_end, first, last}, out + begin * panel_columns, ldo, output});
    begin += part.panels;
  }
}

void matmul(const PackedWeight& weight, const Activations& x, const MatmulRange& range, const SumsTaker& taker) {
  if (kernels_for(weight.format, isa_in_use()).hands_over) {
    return run({weight, x, range, nullptr, 0, Output::store, &taker});
  }
  alignas(64) float sums[32 * panel_columns];
  for (int64_t panel = range.panel_begin; panel < range.panel_end; ++panel) {
    for (int64_t row = range.row_begin; row < range.row_end; row += 32) {
      const int64_t rows = std::min<int64_t>(range.row_end - row, 32);
      float* origin = sums - row * panel_columns - panel * panel_columns;
      matmul(weight, x, {row, row + rows, panel, panel + 1}, origin, panel_columns, Output::store);
      taker.take(taker.context, sums, row, rows, panel);
    }
  }
}

}  // namespace trivet
