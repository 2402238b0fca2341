// Paged attention for any processor, in compiler vectors: what AVX2 machines run, and the others' check.
#include "attention_task.h"

namespace trivet {
namespace {

// A pair of bfloat16 in each word as two floats.
inline Floats even(Words pairs) { return (Floats)(pairs << 16); }
inline Floats odd(Words pairs) { return (Floats)(pairs & 0xffff0000u); }

constexpr int ROWS_AT_ONCE = 4;

struct PlainBfloat16Engine {
  using Cell = Bfloat16;
  using Weight = Bfloat16;

  static void store_weights(Weight* to, Floats values) { store_bfloat16(to, values); }

  template <typename Right>
  static void multiply(const Bfloat16* left, int64_t left_stride, int64_t pairs, Right right, float* out,
                       int64_t out_stride) {
    Floats sums[ROWS_AT_ONCE] = {};
    for (int64_t pair = 0; pair < pairs; ++pair) {
      const Words both = load_words(right(pair));
      for (int row = 0; row < ROWS_AT_ONCE; ++row) {
        const Bfloat16* from = left + row * left_stride + 2 * pair;
        sums[row] += even(both) * to_float(from[0]);
        sums[row] += odd(both) * to_float(from[1]);
      }
    }
    for (int row = 0; row < ROWS_AT_ONCE; ++row) {
      store(out + row * out_stride, sums[row]);
    }
  }

  void scores(const Cell* query, int64_t rows, int64_t size, const Cell* const* keys, int64_t count, float* s,
              int64_t stride) {
    for (int64_t sub = 0; sub < count; ++sub) {
      for (int64_t row = 0; row < rows; row += ROWS_AT_ONCE) {
        multiply(
            query + row * size, size, size / 2, [&](int64_t pair) { return keys[sub] + pair * 32; },
            s + row * stride + sub * SUB_BLOCK, stride);
      }
    }
  }

  void values(const Weight* weights, int64_t rows, int64_t stride, const Cell* const* values, int64_t count,
              int64_t size, float* out) {
    for (int64_t row = 0; row < rows; row += ROWS_AT_ONCE) {
      for (int64_t at = 0; at < size; at += LANES) {
        multiply(
            weights + row * stride, stride, count * 8,
            [&](int64_t pair) { return values[pair / 8] + (pair % 8 * size + at) * 2; }, out + row * size + at, size);
      }
    }
  }
};

struct PlainFloat32Engine {
  using Cell = float;
  using Weight = float;

  static void store_weights(Weight* to, Floats values) { store(to, values); }

  template <typename Right>
  static void multiply(const float* left, int64_t left_stride, int64_t depth, Right right, float* out,
                       int64_t out_stride) {
    Floats sums[ROWS_AT_ONCE] = {};
    for (int64_t at = 0; at < depth; ++at) {
      const Floats values = load(right(at));
      for (int row = 0; row < ROWS_AT_ONCE; ++row) {
        sums[row] += values * left[row * left_stride + at];
      }
    }
    for (int row = 0; row < ROWS_AT_ONCE; ++row) {
      store(out + row * out_stride, sums[row]);
    }
  }

  void scores(const Cell* query, int64_t rows, int64_t size, const Cell* const* keys, int64_t count, float* s,
              int64_t stride) {
    for (int64_t sub = 0; sub < count; ++sub) {
      for (int64_t row = 0; row < rows; row += ROWS_AT_ONCE) {
        multiply(
            query + row * size, size, size, [&](int64_t at) { return keys[sub] + at * SUB_BLOCK; },
            s + row * stride + sub * SUB_BLOCK, stride);
      }
    }
  }

  void values(const Weight* weights, int64_t rows, int64_t stride, const Cell* const* values, int64_t count,
              int64_t size, float* out) {
    for (int64_t row = 0; row < rows; row += ROWS_AT_ONCE) {
      for (int64_t at = 0; at < size; at += LANES) {
        multiply(
            weights + row * stride, stride, count * SUB_BLOCK,
            [&](int64_t token) { return values[token / SUB_BLOCK] + token % SUB_BLOCK * size + at; },
            out + row * size + at, size);
      }
    }
  }
};

}  // namespace

Attend attention_plain_bfloat16() { return attend<PlainBfloat16Engine>; }
Attend attention_plain_float32() { return attend<PlainFloat32Engine>; }

}  // namespace trivet
