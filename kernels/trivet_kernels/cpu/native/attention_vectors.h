// The attention engines in compiler vectors: for AVX2, for any processor, and as the others' check.
#pragma once

#include <type_traits>

#include "attention_task.h"

namespace trivet {
namespace {

// A pair of bfloat16 in each word as two floats.
inline Floats even(Words pairs) { return (Floats)(pairs << 16); }
inline Floats odd(Words pairs) { return (Floats)(pairs & 0xffff0000u); }

inline Floats whole_numbers(const int8_t* cells) {
  typedef int8_t Bytes __attribute__((vector_size(16)));
  Bytes bytes;
  std::memcpy(&bytes, cells, sizeof bytes);
  return __builtin_convertvector(__builtin_convertvector(bytes, Ints), Floats);
}

struct Bfloat16Pairs {
  using Cell = Bfloat16;
  static constexpr int64_t DEPTH = 2;  // of one step

  static void store_weights(Cell* to, Floats values) { store_bfloat16(to, values); }
  static void widen(const int8_t* cells, int64_t count, Cell* to) {
    for (int64_t at = 0; at < count; at += 64) {
      for (int64_t part = 0; part < 4; ++part) {
        Bfloat16 both[LANES];
        store_bfloat16(both, whole_numbers(cells + at + part * LANES));
        std::memcpy(to + at + part * 8, both, 8 * sizeof(Bfloat16));
        std::memcpy(to + at + 32 + part * 8, both + 8, 8 * sizeof(Bfloat16));
      }
    }
  }
  template <int count>
  static void add_products(Floats (&sums)[count], const Cell* left, int64_t stride, const Cell* line) {
    const Words both = load_words(line);
    const Floats first = even(both), second = odd(both);
    for (int row = 0; row < count; ++row) {
      sums[row] += first * to_float(left[row * stride]);
      sums[row] += second * to_float(left[row * stride + 1]);
    }
  }
};

struct SingleFloats {
  using Cell = float;
  static constexpr int64_t DEPTH = 1;

  static void store_weights(Cell* to, Floats values) { store(to, values); }
  static void widen(const int8_t* cells, int64_t count, Cell* to) {
    for (int64_t at = 0; at < count; at += LANES) {
      store(to + at, whole_numbers(cells + at));
    }
  }
  template <int count>
  static void add_products(Floats (&sums)[count], const Cell* left, int64_t stride, const Cell* line) {
    const Floats values = load(line);
    for (int row = 0; row < count; ++row) {
      sums[row] += values * left[row * stride];
    }
  }
};

template <typename Type>
struct VectorEngine : Type {
  using Cell = typename Type::Cell;
  using Weight = Cell;
  static constexpr int64_t DEPTH = Type::DEPTH, LINE = LANES * DEPTH;
  static constexpr int ROWS_AT_ONCE = 4;

  static constexpr bool TAKES_INT8 = false;

  explicit VectorEngine(int64_t) {}
  static Floats power(Floats x) { return exp2(x); }
  void take(const Chunk<Cell>&, int64_t, Cell*) {}

  // Calls `work` with a number of rows known when compiled.
  template <typename Work>
  static void by_rows(int64_t rows, Work work) {
    int64_t row = 0;
    for (; row + ROWS_AT_ONCE <= rows; row += ROWS_AT_ONCE) {
      work(row, std::integral_constant<int, ROWS_AT_ONCE>());
    }
    if (rows - row == 3) {
      work(row, std::integral_constant<int, 3>());
    } else if (rows - row == 2) {
      work(row, std::integral_constant<int, 2>());
    } else if (rows - row == 1) {
      work(row, std::integral_constant<int, 1>());
    }
  }

  void scores(const Cell* query, int64_t rows, int64_t size, const Chunk<Cell>& chunk, float* s, const Ahead& ahead) {
    for (int64_t sub = 0; sub < chunk.count; ++sub) {
      ahead.touch(sub);
      by_rows(rows, [&](int64_t row, auto number) {
        constexpr int count = decltype(number)::value;
        Floats sums[count] = {};
        for (int64_t step = 0; step < size / DEPTH; ++step) {
          Type::template add_products<count>(sums, query + row * size + step * DEPTH, size,
                                             chunk.keys[sub] + step * LINE);
        }
        for (int index = 0; index < count; ++index) {
          store(s + (row + index) * SCORE_STRIDE + sub * SUB_BLOCK, sums[index]);
        }
      });
    }
  }

  void values(const Weight* weights, int64_t rows, int64_t size, const Chunk<Cell>& chunk, float* out,
              const Ahead& ahead) {
    by_rows(rows, [&](int64_t row, auto number) {
      constexpr int count = decltype(number)::value;
      for (int64_t at = 0; at < size; at += LANES) {
        Floats sums[count] = {};
        for (int64_t sub = 0; sub < chunk.count; ++sub) {
          if (row + at == 0) {
            ahead.touch(sub);
          }
          const Cell* left = weights + row * weight_stride<Weight> + sub * SUB_BLOCK;
          for (int64_t step = 0; step < SUB_BLOCK / DEPTH; ++step) {
            Type::template add_products<count>(sums, left + step * DEPTH, weight_stride<Weight>,
                                               chunk.values[sub] + (step * size + at) * DEPTH);
          }
        }
        for (int index = 0; index < count; ++index) {
          store(out + (row + index) * size + at, sums[index]);
        }
      }
    });
  }
};

}  // namespace
}  // namespace trivet
