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

// 32 cells of int8 as bfloat16: whole numbers up to 127 are exact in the upper half of a float.
inline __m512i widened(const int8_t* cells) {
  const __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)cells)));
  const __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)(cells + 16))));
  return (__m512i)_mm512_cvtne2ps_pbh(high, low);
}
#endif

}  // namespace
}  // namespace trivet
