// 2^x and the widening of int8 for the AVX-512 engines.
#pragma once

#include <immintrin.h>

#include "vector.h"

namespace trivet {
namespace {

// The part of x above the whole number below it, and the polynomial's result scaled by that number: 0 far below.
inline __m512 fraction(__m512 x) { return _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }

// To 3e-6 of its value: a hundredth of what bfloat16 rounds.
inline Floats power_for_bfloat16(Floats exponent) {
  const __m512 x = (__m512)exponent, part = fraction(x);
  __m512 result = _mm512_set1_ps(1.342668610e-2f);
  result = _mm512_fmadd_ps(result, part, _mm512_set1_ps(5.224247129e-2f));
  result = _mm512_fmadd_ps(result, part, _mm512_set1_ps(2.412802061e-1f));
  result = _mm512_fmadd_ps(result, part, _mm512_set1_ps(6.930448447e-1f));
  result = _mm512_fmadd_ps(result, part, _mm512_set1_ps(1.0f));
  return (Floats)_mm512_scalef_ps(result, x);
}

// To 1e-7 of its value.
inline Floats power_for_float32(Floats exponent) {
  const __m512 x = (__m512)exponent, part = fraction(x);
  __m512 result = _mm512_set1_ps(1.867130279e-3f);
  result = _mm512_fmadd_ps(result, part, _mm512_set1_ps(9.017029880e-3f));
  result = _mm512_fmadd_ps(result, part, _mm512_set1_ps(5.579991342e-2f));
  result = _mm512_fmadd_ps(result, part, _mm512_set1_ps(2.401644501e-1f));
  result = _mm512_fmadd_ps(result, part, _mm512_set1_ps(6.931513118e-1f));
  result = _mm512_fmadd_ps(result, part, _mm512_set1_ps(1.0f));
  return (Floats)_mm512_scalef_ps(result, x);
}

#if defined(__AVX512BF16__)
inline void put_bfloat16(Bfloat16* to, Floats values) {
  const __m256bh halves = _mm512_cvtneps_pbh((__m512)values);
  std::memcpy(to, &halves, sizeof halves);
}

#if defined(__AVX512VBMI__)
// The bytes of whole numbers to 127 as bfloat16, the lower ones and then the upper ones.
struct NumberBytes {
  alignas(64) uint8_t bytes[2][128];

  NumberBytes() {
    for (int number = 0; number < 128; ++number) {
      const Bfloat16 cell = to_bfloat16((float)number);
      bytes[0][number] = (uint8_t)cell;
      bytes[1][number] = (uint8_t)(cell >> 8);
    }
  }
};

inline void widen_64(const int8_t* cells, Bfloat16* first, Bfloat16* second) {
  static const NumberBytes numbers;
  const __m512i number = _mm512_loadu_si512(cells), size = _mm512_abs_epi8(number);
  const auto look_up = [&](int half) {
    return _mm512_permutex2var_epi8(_mm512_load_si512(numbers.bytes[half]), size,
                                    _mm512_load_si512(numbers.bytes[half] + 64));
  };
  const __m512i low = look_up(0);
  const __m512i high = _mm512_ternarylogic_epi32(look_up(1), number, _mm512_set1_epi8(-128), 0xf8);  // a | (b & c)
  _mm512_storeu_si512(first, _mm512_unpacklo_epi8(low, high));
  _mm512_storeu_si512(second, _mm512_unpackhi_epi8(low, high));
}
#else
// Whole numbers up to 127 are exact in the upper half of a float.
inline __m512i widened(__m256i cells) {
  const __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(cells)));
  const __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(cells, 1)));
  return (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
}

inline void widen_64(const int8_t* cells, Bfloat16* first, Bfloat16* second) {
  const __m512i all = _mm512_permutexvar_epi64(_mm512_set_epi64(7, 5, 3, 1, 6, 4, 2, 0), _mm512_loadu_si512(cells));
  _mm512_storeu_si512(first, widened(_mm512_castsi512_si256(all)));
  _mm512_storeu_si512(second, widened(_mm512_extracti64x4_epi64(all, 1)));
}
#endif

// int8 as int8_place has them, to whole numbers of bfloat16 in order.
inline void widen_to_bfloat16(const int8_t* cells, int64_t count, Bfloat16* to) {
  for (int64_t at = 0; at < count; at += 64) {
    widen_64(cells + at, to + at, to + at + 32);
  }
}
#endif

}  // namespace
}  // namespace trivet
