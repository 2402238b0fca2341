// Eight doubles at a time, and the noise that sampling is made of: in whatever registers the including file is compiled
// for.
//
// Only sums, products and quotients in a written order, none of them fused (build.py), so that logarithm and
// exponential have the same bits on every machine, and the noise those of trivet_worker/sampling/noise.py.
#pragma once

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include <cstdint>
#include <cstring>

namespace trivet {
namespace {

typedef double Doubles __attribute__((vector_size(64)));
typedef int64_t Longs __attribute__((vector_size(64)));
typedef uint64_t Hashes __attribute__((vector_size(64)));

constexpr int WIDTH = 8;

inline Doubles load_doubles(const float* from) {
  typedef float Half __attribute__((vector_size(32)));
  Half values;
  std::memcpy(&values, from, sizeof values);
  return __builtin_convertvector(values, Doubles);
}

inline Doubles select(Longs condition, Doubles yes, Doubles no) {
  return (Doubles)(((Longs)yes & condition) | ((Longs)no & ~condition));
}

inline bool any_of(Longs condition) {
#if defined(__AVX512F__)
  return _mm512_test_epi64_mask((__m512i)condition, (__m512i)condition) != 0;
#elif defined(__AVX2__)
  typedef int64_t Half __attribute__((vector_size(32)));
  Half halves[2];
  std::memcpy(halves, &condition, sizeof condition);
  const __m256i either = (__m256i)(halves[0] | halves[1]);
  return !_mm256_testz_si256(either, either);
#else
  int64_t all = 0;
  for (int lane = 0; lane < WIDTH; ++lane) all |= condition[lane];
  return all != 0;
#endif
}

inline double sum_of(Doubles values) {
  const double low = (values[0] + values[4]) + (values[2] + values[6]);
  return low + ((values[1] + values[5]) + (values[3] + values[7]));
}

// Natural logarithm of positive normal numbers to within one unit in the last place (the method of fdlibm's e_log.c:
// x = 2^k m with m around 1, log m by a polynomial in (m - 1) / (m + 1)).
inline Doubles log_of(Doubles x) {
  const Longs bits = (Longs)x;
  const Longs k = (bits - 0x3fe6a09e667f3bcd) >> 52;
  const Doubles f = (Doubles)(bits - (k << 52)) - 1.0;
  const Doubles exponent = __builtin_convertvector(k, Doubles);
  const Doubles s = f / (f + 2.0), z = s * s, w = z * z;
  const Doubles even = w * (w * (w * 1.531383769920937332e-01 + 2.222219843214978396e-01) + 3.999999999940941908e-01);
  const Doubles odd =
      z * (w * (w * (w * 1.479819860511658591e-01 + 1.818357216161805012e-01) + 2.857142874366239149e-01) +
           6.666666666666735130e-01);
  const Doubles rest = even + odd, half = f * f * 0.5;
  return exponent * 6.93147180369123816490e-01 -
         ((half - (s * (half + rest) + exponent * 1.90821492927058770002e-10)) - f);
}

// e^x for x <= 0 to within two units in the last place, and 0 below -700.
inline Doubles exp_of(Doubles x) {
  const Longs tiny = x < -700.0;
  x = select(tiny, Doubles{} - 700.0, x);
  const double magic = 6755399441055744.0;  // 1.5 * 2^52: adding it rounds to a whole number
  const Doubles shifted = x * 1.44269504088896340736 + magic;
  const Doubles k = shifted - magic;
  const Doubles r = (x - k * 6.93147180369123816490e-01) - k * 1.90821492927058770002e-10;
  Doubles sum = r * (1.0 / 39916800) + (1.0 / 3628800);
  sum = sum * r + (1.0 / 362880);
  sum = sum * r + (1.0 / 40320);
  sum = sum * r + (1.0 / 5040);
  sum = sum * r + (1.0 / 720);
  sum = sum * r + (1.0 / 120);
  sum = sum * r + (1.0 / 24);
  sum = sum * r + (1.0 / 6);
  sum = sum * r + 0.5;
  sum = sum * r + 1.0;
  sum = sum * r + 1.0;
  const Longs whole = (Longs)shifted - (Longs)(Doubles{} + magic);
  return select(tiny, Doubles{}, (Doubles)((Longs)sum + (whole << 52)));
}

constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15;

// The finaliser of SplitMix64, for one number or eight.
template <typename T>
inline T mix(T value) {
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9u;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EBu;
  return value ^ (value >> 31);
}

inline uint64_t row_key(uint64_t seed, int64_t position) {
  return mix(mix(seed + GOLDEN) + (uint64_t)position * GOLDEN);
}

// Of 52 bits and a half: neither 0 nor 1 can come out.
inline Doubles uniform(uint64_t key, Hashes ids) {
  const Hashes bits = mix((ids + 1) * GOLDEN + key);
  return ((Doubles)((bits >> 12) | 0x4330000000000000u) - 4503599627370496.0 + 0.5) * 0x1p-52;
}

inline Doubles gumbel(Doubles uniform) { return -log_of(-log_of(uniform)); }

// At least the noise of these, for little: -log(1 - u) rounded up to a power of two.
inline Doubles noise_bound(Doubles uniform) {
  const Longs exponent = ((Longs)(1.0 - uniform) >> 52) - 1023;
  return __builtin_convertvector(exponent, Doubles) * -0.69314718056 + 1e-9;
}

}  // namespace
}  // namespace trivet
