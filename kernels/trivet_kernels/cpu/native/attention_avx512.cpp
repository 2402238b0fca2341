// Paged attention on AVX-512: bfloat16 pairs where the processor multiplies them, and float32.
#include "attention_avx512.h"

#include <immintrin.h>

#include <type_traits>

#include "attention_task.h"

namespace trivet {
namespace {

constexpr int64_t ROWS_AT_ONCE = 8;  // times two vectors: sixteen sums in registers

// Calls `work` with a number of rows known when compiled, as few times as it takes.
template <typename Work>
inline void by_rows(int64_t rows, Work work) {
  int64_t row = 0;
  for (; row + ROWS_AT_ONCE <= rows; row += ROWS_AT_ONCE) {
    work(row, std::integral_constant<int, ROWS_AT_ONCE>());
  }
  if (rows - row >= 4) {
    work(row, std::integral_constant<int, 4>());
    row += 4;
  }
  if (rows - row == 3) {
    work(row, std::integral_constant<int, 3>());
  } else if (rows - row == 2) {
    work(row, std::integral_constant<int, 2>());
  } else if (rows - row == 1) {
    work(row, std::integral_constant<int, 1>());
  }
}

#if defined(__AVX512BF16__)
struct Bfloat16Pairs {
  using Cell = Bfloat16;
  using Right = __m512bh;
  static constexpr int64_t DEPTH = 2;  // of one step

  static Floats power(Floats x) { return power_for_bfloat16(x); }
  static void store_weights(Cell* to, Floats values) { put_bfloat16(to, values); }
  static void widen(const int8_t* cells, int64_t count, Cell* to) { widen_to_bfloat16(cells, count, to); }
  static Right line(const Cell* at) { return (__m512bh)_mm512_loadu_si512(at); }
  static __m512 add_product(__m512 sum, const Cell* left, Right right) {
    int32_t both;
    std::memcpy(&both, left, sizeof both);
    return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32(both), right);
  }
};
#endif

struct SingleFloats {
  using Cell = float;
  using Right = __m512;
  static constexpr int64_t DEPTH = 1;

  static Floats power(Floats x) { return power_for_float32(x); }
  static void store_weights(Cell* to, Floats values) { store(to, values); }
  static void widen(const int8_t* cells, int64_t count, Cell* to) {
    for (int64_t at = 0; at < count; at += 16) {
      _mm512_storeu_ps(to + at,
                       _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)(cells + at)))));
    }
  }
  static Right line(const Cell* at) { return _mm512_loadu_ps(at); }
  static __m512 add_product(__m512 sum, const Cell* left, Right right) {
    return _mm512_fmadd_ps(_mm512_set1_ps(*left), right, sum);
  }
};

template <typename Type>
struct Avx512Engine : Type {
  using Cell = typename Type::Cell;
  using Weight = Cell;
  static constexpr int64_t DEPTH = Type::DEPTH, LINE = 16 * DEPTH;

  static constexpr bool TAKES_INT8 = false;

  explicit Avx512Engine(int64_t) {}
  void take(const Chunk<Cell>&, int64_t, Cell*) {}

  // out[r][0..32) += over steps left[r][step] · the two lines that `right` gives for it, r < count.
  template <int count, typename Lines>
  static void multiply(const Cell* left, int64_t left_stride, int64_t steps, __m512 (&low)[count],
                       __m512 (&high)[count], Lines lines) {
    for (int64_t step = 0; step < steps; ++step) {
      typename Type::Right first, second;
      lines(step, first, second);
      for (int row = 0; row < count; ++row) {
        const Cell* from = left + row * left_stride + DEPTH * step;
        low[row] = Type::add_product(low[row], from, first);
        high[row] = Type::add_product(high[row], from, second);
      }
    }
  }

  void scores(const Cell* query, int64_t rows, int64_t size, const Chunk<Cell>& chunk, float* s, const Ahead& ahead) {
    for (int64_t sub = 0; sub < chunk.count; sub += 2) {
      ahead.touch(sub);
      ahead.touch(sub + 1);
      const Cell *one = chunk.keys[sub], *two = chunk.keys[sub + 1];
      by_rows(rows, [&](int64_t row, auto number) {
        constexpr int count = decltype(number)::value;
        __m512 low[count] = {}, high[count] = {};
        multiply<count>(query + row * size, size, size / DEPTH, low, high,
                        [&](int64_t step, typename Type::Right& first, typename Type::Right& second) {
                          first = Type::line(one + step * LINE);
                          second = Type::line(two + step * LINE);
                        });
        for (int index = 0; index < count; ++index) {
          float* to = s + (row + index) * SCORE_STRIDE + sub * SUB_BLOCK;
          _mm512_storeu_ps(to, low[index]);
          _mm512_storeu_ps(to + 16, high[index]);
        }
      });
    }
  }

  void values(const Weight* weights, int64_t rows, int64_t size, const Chunk<Cell>& chunk, float* out,
              const Ahead& ahead) {
    by_rows(rows, [&](int64_t row, auto number) {
      constexpr int count = decltype(number)::value;
      for (int64_t at = 0; at < size; at += 32) {
        __m512 low[count] = {}, high[count] = {};
        for (int64_t sub = 0; sub < chunk.count; ++sub) {
          if (row + at == 0) {  // a few at a time, or they wait for each other
            ahead.touch(sub);
          }
          const Cell* from = chunk.values[sub] + at * DEPTH;
          multiply<count>(weights + row * weight_stride<Weight> + sub * SUB_BLOCK, weight_stride<Weight>,
                          SUB_BLOCK / DEPTH, low, high,
                          [&](int64_t step, typename Type::Right& first, typename Type::Right& second) {
                            first = Type::line(from + step * size * DEPTH);
                            second = Type::line(from + step * size * DEPTH + LINE);
                          });
        }
        for (int index = 0; index < count; ++index) {
          _mm512_storeu_ps(out + (row + index) * size + at, low[index]);
          _mm512_storeu_ps(out + (row + index) * size + at + 16, high[index]);
        }
      }
    });
  }
};

}  // namespace

#if defined(__AVX512BF16__)
const AttentionKernels& attention_avx512_bfloat16(bool is_int8) {
  return kernels_of<Avx512Engine<Bfloat16Pairs>>(is_int8);
}
#endif
const AttentionKernels& attention_avx512_float32(bool is_int8) {
  return kernels_of<Avx512Engine<SingleFloats>>(is_int8);
}

}  // namespace trivet
