// Paged attention on AVX-512: bfloat16 pairs where the processor multiplies them, and float32.
#include <immintrin.h>

#include "attention_task.h"

namespace trivet {
namespace {

constexpr int ROWS_AT_ONCE = 8;  // times two vectors: sixteen sums in registers

struct Avx512Bfloat16Engine {
  using Cell = Bfloat16;
  using Weight = Bfloat16;

  static void store_weights(Weight* to, Floats values) { store_bfloat16(to, values); }

  static __m512bh pair_of(const Bfloat16* at) {
    int32_t both;
    std::memcpy(&both, at, sizeof both);
    return (__m512bh)_mm512_set1_epi32(both);
  }

  // out[r][0..32) = sum over pairs of left[r][2 pair, 2 pair + 1] · right, r < 8; right's vectors are `step` apart.
  template <typename Right>
  static void multiply(const Bfloat16* left, int64_t left_stride, int64_t pairs, Right right, float* out,
                       int64_t out_stride) {
    __m512 low[ROWS_AT_ONCE], high[ROWS_AT_ONCE];
    for (int row = 0; row < ROWS_AT_ONCE; ++row) {
      low[row] = high[row] = _mm512_setzero_ps();
    }
    for (int64_t pair = 0; pair < pairs; ++pair) {
      __m512bh first, second;
      right(pair, first, second);
      for (int row = 0; row < ROWS_AT_ONCE; ++row) {
        const __m512bh both = pair_of(left + row * left_stride + 2 * pair);
        low[row] = _mm512_dpbf16_ps(low[row], both, first);
        high[row] = _mm512_dpbf16_ps(high[row], both, second);
      }
    }
    for (int row = 0; row < ROWS_AT_ONCE; ++row) {
      _mm512_storeu_ps(out + row * out_stride, low[row]);
      _mm512_storeu_ps(out + row * out_stride + 16, high[row]);
    }
  }

  void scores(const Cell* query, int64_t rows, int64_t size, const Cell* const* keys, int64_t count, float* s,
              int64_t stride) {
    for (int64_t sub = 0; sub < count; sub += 2) {
      const Cell *one = keys[sub], *two = keys[sub + 1];
      for (int64_t row = 0; row < rows; row += ROWS_AT_ONCE) {
        multiply(
            query + row * size, size, size / 2,
            [&](int64_t pair, __m512bh& first, __m512bh& second) {
              first = (__m512bh)_mm512_loadu_si512(one + pair * 32);
              second = (__m512bh)_mm512_loadu_si512(two + pair * 32);
            },
            s + row * stride + sub * SUB_BLOCK, stride);
      }
    }
  }

  void values(const Weight* weights, int64_t rows, int64_t stride, const Cell* const* values, int64_t count,
              int64_t size, float* out) {
    for (int64_t row = 0; row < rows; row += ROWS_AT_ONCE) {
      for (int64_t at = 0; at < size; at += 32) {
        multiply(
            weights + row * stride, stride, count * 8,
            [&](int64_t pair, __m512bh& first, __m512bh& second) {
              const Cell* from = values[pair / 8] + (pair % 8 * size + at) * 2;
              first = (__m512bh)_mm512_loadu_si512(from);
              second = (__m512bh)_mm512_loadu_si512(from + 32);
            },
            out + row * size + at, size);
      }
    }
  }
};

struct Avx512Float32Engine {
  using Cell = float;
  using Weight = float;

  static void store_weights(Weight* to, Floats values) { store(to, values); }

  template <typename Right>
  static void multiply(const float* left, int64_t left_stride, int64_t depth, Right right, float* out,
                       int64_t out_stride) {
    __m512 low[ROWS_AT_ONCE], high[ROWS_AT_ONCE];
    for (int row = 0; row < ROWS_AT_ONCE; ++row) {
      low[row] = high[row] = _mm512_setzero_ps();
    }
    for (int64_t at = 0; at < depth; ++at) {
      __m512 first, second;
      right(at, first, second);
      for (int row = 0; row < ROWS_AT_ONCE; ++row) {
        const __m512 value = _mm512_set1_ps(left[row * left_stride + at]);
        low[row] = _mm512_fmadd_ps(value, first, low[row]);
        high[row] = _mm512_fmadd_ps(value, second, high[row]);
      }
    }
    for (int row = 0; row < ROWS_AT_ONCE; ++row) {
      _mm512_storeu_ps(out + row * out_stride, low[row]);
      _mm512_storeu_ps(out + row * out_stride + 16, high[row]);
    }
  }

  void scores(const Cell* query, int64_t rows, int64_t size, const Cell* const* keys, int64_t count, float* s,
              int64_t stride) {
    for (int64_t sub = 0; sub < count; sub += 2) {
      const Cell *one = keys[sub], *two = keys[sub + 1];
      for (int64_t row = 0; row < rows; row += ROWS_AT_ONCE) {
        multiply(
            query + row * size, size, size,
            [&](int64_t at, __m512& first, __m512& second) {
              first = _mm512_loadu_ps(one + at * SUB_BLOCK);
              second = _mm512_loadu_ps(two + at * SUB_BLOCK);
            },
            s + row * stride + sub * SUB_BLOCK, stride);
      }
    }
  }

  void values(const Weight* weights, int64_t rows, int64_t stride, const Cell* const* values, int64_t count,
              int64_t size, float* out) {
    for (int64_t row = 0; row < rows; row += ROWS_AT_ONCE) {
      for (int64_t at = 0; at < size; at += 32) {
        multiply(
            weights + row * stride, stride, count * SUB_BLOCK,
            [&](int64_t token, __m512& first, __m512& second) {
              const Cell* from = values[token / SUB_BLOCK] + token % SUB_BLOCK * size + at;
              first = _mm512_loadu_ps(from);
              second = _mm512_loadu_ps(from + 16);
            },
            out + row * size + at, size);
      }
    }
  }
};

}  // namespace

#if defined(__AVX512BF16__)
Attend attention_avx512_bfloat16() { return attend<Avx512Bfloat16Engine>; }
#endif
Attend attention_avx512_float32() { return attend<Avx512Float32Engine>; }

}  // namespace trivet
