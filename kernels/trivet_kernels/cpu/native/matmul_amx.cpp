// bf16 and int8 products on AMX tiles.
//
// A tile holds 16 rows of 64 bytes; one instruction multiplies 16 activation rows with 16 columns over one line of k.
// Many rows: two activation tiles times the two tiles of a panel, four accumulators, so that each loaded tile is used
// twice. Sixteen rows or fewer: one activation tile, as many rows high as there are, bound by the stream of weights.
// Both add up k in the same order with the same instruction, so the bits agree.
#include <immintrin.h>

#include <algorithm>

#include "matmul_kernels.h"
#include "panel_prefetch.h"
#include "tile_scope.h"

namespace trivet {
namespace {

constexpr int64_t tile_bytes = 16 * line_bytes;
// Activations that stay in the L2 (2 MiB wherever there are tiles) while all panels pass by.
constexpr int64_t chunk_bytes = 1 << 20;
constexpr int64_t chunk_blocks = 16;  // of 32 rows at most
constexpr int64_t part_steps = 18;    // 36 KiB of a panel
// How far the stream of weights is asked for ahead of its use: about the latency of memory times its bandwidth.
constexpr int64_t stream_ahead = 2 * step_bytes;

// The operands of the tile instructions are written into the code, hence a macro.
#define TRIVET_TILE_DOT(c, a, b)                \
  do {                                          \
    if constexpr (format == WeightFormat::bf16) \
      _tile_dpbf16ps(c, a, b);                  \
    else                                        \
      _tile_dpbssd(c, a, b);                    \
  } while (false)

// Where the accumulators go: sums of a part of k, and finished ones on their way out.
struct alignas(64) Scratch {
  float values[32 * panel_columns];
};

// Finished accumulators, in the order of rows: scaled, and stored, added or handed over.
template <WeightFormat format>
void put_out(const MatmulTask& task, float* sums, int64_t row, int64_t rows, int64_t panel) {
  if (format == WeightFormat::bf16 && task.taker != nullptr) {
    task.taker->take(task.taker->context, sums, row, rows, panel);
    return;
  }
  const int64_t columns = task.columns(panel);
  const uint32_t mask = columns == 32 ? ~0u : (1u << columns) - 1;
  const __mmask16 masks[2] = {static_cast<__mmask16>(mask), static_cast<__mmask16>(mask >> 16)};
  const auto* column_scales = reinterpret_cast<const float*>(task.panel(panel) + task.weight.steps * step_bytes);
  for (int64_t i = 0; i < rows; ++i) {
    for (int half = 0; half < 2; ++half) {
      float* sum = sums + i * panel_columns + half * 16;
      __m512 value = _mm512_load_ps(sum);
      if constexpr (format == WeightFormat::i8) {
        value = _mm512_cvtepi32_ps(_mm512_castps_si512(value));
        value = _mm512_mul_ps(value, _mm512_loadu_ps(column_scales + half * 16));
        value = _mm512_mul_ps(value, _mm512_set1_ps(task.x.scales.as<float>()[row + i]));
      }
      if (task.taker != nullptr) {
        _mm512_store_ps(sum, value);
        continue;
      }
      float* out = task.out_at(row + i, panel) + half * 16;
      if (task.output == Output::add) value = _mm512_add_ps(_mm512_maskz_loadu_ps(masks[half], out), value);
      _mm512_mask_storeu_ps(out, masks[half], value);
    }
  }
  if (task.taker != nullptr) task.taker->take(task.taker->context, sums, row, rows, panel);
}

// The finished block before the one that is being multiplied: a few of its rows are put out at each step, where the
// tiles leave the rest of the core idle.
template <WeightFormat format>
class Finished {
 public:
  static constexpr int64_t rows_at_once = 4;

  explicit Finished(const MatmulTask& task) : task_(task) {}
  void begin(float* sums, int64_t row, int64_t rows, int64_t panel) {
    sums_ = sums;
    row_ = row;
    left_ = rows;
    panel_ = panel;
  }
  [[gnu::always_inline]] void visit() {
    if (left_ > 0) put(std::min(rows_at_once, left_));
  }
  void end() {
    if (left_ > 0) put(left_);
  }

 private:
  [[gnu::noinline]] void put(int64_t rows) {
    put_out<format>(task_, sums_, row_, rows, panel_);
    sums_ += rows * panel_columns;
    row_ += rows;
    left_ -= rows;
  }

  const MatmulTask& task_;
  float* sums_ = nullptr;
  int64_t row_ = 0, left_ = 0, panel_ = 0;
};

template <WeightFormat format>
bool stores_directly(const MatmulTask& task, int64_t panel) {
  return format == WeightFormat::bf16 && task.taker == nullptr && task.output == Output::store &&
         task.columns(panel) == panel_columns;
}

// 32 rows by one panel, over the steps [step_begin, step_end). Sums of an earlier part of k come from `scratch`, those
// of an unfinished one go there. Rows beyond `rows` are computed and dropped.
//
// The activations pass with a hint that they will not be used again soon, so that the panel's part, used by all blocks
// of rows, stays in the L1 (measured: 86 against 70 % of the tile rate).
template <WeightFormat format>
void wide_block(const MatmulTask& task, int64_t row, int64_t rows, int64_t panel, int64_t step_begin, int64_t step_end,
                Scratch& scratch, PanelPrefetch& next, Finished<format>& finished) {
  const uint8_t* upper = task.x.line(row, step_begin);
  const uint8_t* lower = task.x.line(row + 16, step_begin);
  const uint8_t* weights = task.panel(panel) + step_begin * step_bytes;
  const int64_t pause = std::max<int64_t>(1, (step_end - step_begin) * Finished<format>::rows_at_once / 32);
  constexpr int64_t stride = panel_columns * 4;
  if (step_begin == 0) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  } else {
    _tile_loadd(0, scratch.values, stride);
    _tile_loadd(1, scratch.values + 16, stride);
    _tile_loadd(2, scratch.values + 16 * panel_columns, stride);
    _tile_loadd(3, scratch.values + 16 * panel_columns + 16, stride);
  }
  int64_t waited = 0;
  for (int64_t step = step_begin; step < step_end; ++step) {
    _tile_stream_loadd(4, upper, line_bytes);
    _tile_loadd(6, weights, line_bytes);
    TRIVET_TILE_DOT(0, 4, 6);
    _tile_loadd(7, weights + tile_bytes, line_bytes);
    TRIVET_TILE_DOT(1, 4, 7);
    _tile_stream_loadd(5, lower, line_bytes);
    TRIVET_TILE_DOT(2, 5, 6);
    TRIVET_TILE_DOT(3, 5, 7);
    weights += step_bytes;
    upper += tile_bytes;
    lower += tile_bytes;
    next.visit();
    if (++waited == pause) {
      finished.visit();
      waited = 0;
    }
  }
  finished.end();
  _tile_stored(0, scratch.values, stride);
  _tile_stored(1, scratch.values + 16, stride);
  _tile_stored(2, scratch.values + 16 * panel_columns, stride);
  _tile_stored(3, scratch.values + 16 * panel_columns + 16, stride);
  if (step_end == task.weight.steps) finished.begin(scratch.values, row, rows, panel);
}

// Up to 16 rows by one panel. The tiles are `tile_rows` high; rows beyond `rows` are computed and dropped.
//
// One panel at a time, although only two sums are in flight: the weights then come as one stream, which memory
// delivers faster than two (measured: 100 against 85 % of a plain read loop).
template <WeightFormat format>
void narrow_block(const MatmulTask& task, int64_t row, int64_t rows, int64_t panel, int64_t tile_rows) {
  const uint8_t* activations = task.x.line(row, 0);
  const uint8_t* weights = task.panel(panel);
  _tile_zero(0);
  _tile_zero(1);
  for (int64_t step = 0; step < task.weight.steps; ++step) {
    for (int64_t line = 0; line < step_bytes; line += line_bytes) {
      _mm_prefetch(reinterpret_cast<const char*>(weights + stream_ahead + line), _MM_HINT_T1);
    }
    _tile_loadd(4, activations, line_bytes);
    _tile_loadd(6, weights, line_bytes);
    TRIVET_TILE_DOT(0, 4, 6);
    _tile_loadd(7, weights + tile_bytes, line_bytes);
    TRIVET_TILE_DOT(1, 4, 7);
    weights += step_bytes;
    activations += tile_bytes;
  }
  if (rows == tile_rows && stores_directly<format>(task, panel)) {
    float* out = task.out_at(row, panel);
    _tile_stored(0, out, task.ldo * 4);
    _tile_stored(1, out + 16, task.ldo * 4);
    return;
  }
  Scratch scratch;
  _tile_stored(0, scratch.values, panel_columns * 4);
  _tile_stored(1, scratch.values + 16, panel_columns * 4);
  put_out<format>(task, scratch.values, row, rows, panel);
}

template <WeightFormat format>
void matmul_tiles(const MatmulTask& task) {
  const auto [row_begin, row_end, panel_begin, panel_end] = task.range;
  const int64_t rows = row_end - row_begin;
  if (rows <= row_block) {
    const TileScope tiles(rows, line_bytes);
    for (int64_t panel = panel_begin; panel < panel_end; ++panel) {
      narrow_block<format>(task, row_begin, rows, panel, rows);
    }
    return;
  }
  const TileScope tiles(16, line_bytes);
  Scratch scratch[chunk_blocks];
  Finished<format> finished(task);
  const int64_t steps = task.weight.steps;
  // Parts of k, equal but for a step, whose share of a panel fits the L1 beside the passing activations.
  const int64_t parts = (steps + part_steps - 1) / part_steps;
  const int64_t fitting = chunk_bytes / (steps * line_bytes) / 32;
  const int64_t chunk_rows = 32 * std::clamp<int64_t>(fitting, 4, chunk_blocks);
  for (int64_t chunk = row_begin; chunk < row_end; chunk += chunk_rows) {
    const int64_t chunk_end = std::min(chunk + chunk_rows, row_end);
    const int64_t blocks = (chunk_end - chunk + 31) / 32;
    for (int64_t panel = panel_begin; panel < panel_end; ++panel) {
      // Beyond the range too: what comes next is mostly asked for by the same thread.
      const bool last = panel + 1 == task.weight.panels;
      PanelPrefetch next(task.panel(panel + 1), last ? 0 : task.weight.panel_bytes, blocks * steps);
      for (int64_t part = 0; part < parts; ++part) {
        const int64_t step_begin = steps * part / parts, step_end = steps * (part + 1) / parts;
        for (int64_t row = chunk; row < chunk_end; row += 32) {
          const int64_t rows = std::min<int64_t>(chunk_end - row, 32);
          if (rows > 16) {
            // Two in turn where no sums are kept from part to part: they stay in the L1.
            Scratch& sums = scratch[(row - chunk) / 32 % (parts == 1 ? 2 : chunk_blocks)];
            wide_block<format>(task, row, rows, panel, step_begin, step_end, sums, next, finished);
          } else if (part == 0) {
            narrow_block<format>(task, row, rows, panel, 16);
          }
        }
      }
    }
  }
  finished.end();
}

}  // namespace

void matmul_bf16_amx(const MatmulTask& task) { matmul_tiles<WeightFormat::bf16>(task); }
void matmul_i8_amx(const MatmulTask& task) { matmul_tiles<WeightFormat::i8>(task); }

}  // namespace trivet
