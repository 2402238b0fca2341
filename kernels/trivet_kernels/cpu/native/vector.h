// Sixteen floats at a time, in whatever registers the file that includes this is compiled for.
//
// Compiler vectors, not intrinsics: one text for AVX-512, AVX2 and plain machines. What needs special instructions
// (matrix products) is not here.
#pragma once

#include <cstdint>
#include <cstring>

namespace trivet {
// Unnamed, since each file is compiled for its own instruction set and the linker must not share one file's code with
// another.
namespace {

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));

constexpr int LANES = 16;

inline Floats load(const float* from) {
  Floats values;
  std::memcpy(&values, from, sizeof values);
  return values;
}

inline void store(float* to, Floats values) { std::memcpy(to, &values, sizeof values); }

inline Words load_words(const void* from) {
  Words values;
  std::memcpy(&values, from, sizeof values);
  return values;
}

inline Floats splat(float value) { return Floats{} + value; }

inline Ints lane_numbers() { return Ints{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }

inline Floats select(Ints condition, Floats yes, Floats no) {
  return (Floats)(((Ints)yes & condition) | ((Ints)no & ~condition));
}

inline Floats max(Floats a, Floats b) { return a > b ? a : b; }

// Halves onto each other, the same order on every machine: `both(lane, lane + half)` of vectors that stay in registers.
template <typename Both>
inline float folded(Floats values, Both both) {
  typedef float Eight __attribute__((vector_size(32)));
  typedef float Four __attribute__((vector_size(16)));
  Eight eights[2];
  std::memcpy(eights, &values, sizeof eights);
  const Eight eight = both(eights[0], eights[1]);
  Four fours[2];
  std::memcpy(fours, &eight, sizeof fours);
  const Four four = both(fours[0], fours[1]);
  return both(both(four[0], four[2]), both(four[1], four[3]));
}

inline float sum_of(Floats values) {
  return folded(values, [](auto one, auto other) { return one + other; });
}

inline float max_of(Floats values) {
  return folded(values, [](auto one, auto other) { return one > other ? one : other; });
}

// 2^part for part in [-0.5, 0.5]: minimax polynomial of degree 6.
inline Floats exp2_of_part(Floats part) {
  Floats result = splat(1.540353039e-4f);
  result = result * part + splat(1.333355815e-3f);
  result = result * part + splat(9.618129108e-3f);
  result = result * part + splat(5.550410866e-2f);
  result = result * part + splat(2.402265070e-1f);
  result = result * part + splat(6.931471806e-1f);
  result = result * part + splat(1.0f);
  return result;
}

// 2^x to within 2 units in the last place for x in [-126, 126]; 0 below.
inline Floats exp2(Floats x) {
  const Floats magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
  const Ints tiny = x < splat(-126.0f);
  x = select(tiny, splat(-126.0f), x);
  const Floats shifted = x + magic;
  const Ints whole = (Ints)shifted - (Ints)magic;
  const Floats part = x - (shifted - magic);
  Floats result = exp2_of_part(part);
  result = (Floats)((Words)result + ((Words)whole << 23));  // above 126 it wraps, which is no number but no fault
  return select(tiny, Floats{}, result);
}

inline float exp2(float x) { return exp2(splat(x))[0]; }

// bfloat16: the upper half of a float, rounded to nearest even.
typedef uint16_t Bfloat16;

inline float to_float(Bfloat16 value) {
  const uint32_t bits = (uint32_t)value << 16;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

inline Bfloat16 to_bfloat16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  if ((bits & 0x7fffffffu) > 0x7f800000u) {
    return (Bfloat16)((bits >> 16) | 0x40);  // NaN stays NaN
  }
  return (Bfloat16)((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

// The sixteen lanes as bfloat16 in the lower halves of words. NaN may become infinity, which stays as visible.
inline Words rounded(Floats values) {
  const Words bits = (Words)values;
  return (bits + 0x7fffu + ((bits >> 16) & 1)) >> 16;
}

inline void store_bfloat16(Bfloat16* to, Floats values) {
  const Words words = rounded(values);
  typedef uint16_t Halves __attribute__((vector_size(32)));
  const Halves halves = __builtin_convertvector(words, Halves);
  std::memcpy(to, &halves, sizeof halves);
}

inline Floats load_bfloat16(const Bfloat16* from) {
  typedef uint16_t Halves __attribute__((vector_size(32)));
  Halves halves;
  std::memcpy(&halves, from, sizeof halves);
  return (Floats)(__builtin_convertvector(halves, Words) << 16);
}

}  // namespace
}  // namespace trivet
