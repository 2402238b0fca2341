// Scales and minimums of the columns of a panel's block as floats.
#pragma once

#include <immintrin.h>

#include "matmul_blocks.h"

namespace trivet {
namespace {

inline __m512 halves(const uint8_t* at) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
}
inline __m512 unsigned_bytes(const uint8_t* at) {
  return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at))));
}
inline __m512 signed_bytes(const uint8_t* at) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at))));
}

// Scales of 16 columns for values [16 * part, ...) of a block.
template <WeightFormat format>
inline __m512 scales_of(const BlockWalk<format>& walk, int64_t half, int64_t part) {
  if constexpr (format == WeightFormat::q6_k) {
    return _mm512_mul_ps(halves(walk.header + half * 32), signed_bytes(walk.scales() + part * 32 + half * 16));
  } else if constexpr (has_header(format)) {
    return _mm512_mul_ps(halves(walk.header + half * 32), unsigned_bytes(walk.scales() + half * 16));
  } else {
    return halves(walk.scales() + half * 32);
  }
}

template <WeightFormat format>
inline __m512 minimums_of(const BlockWalk<format>& walk, int64_t half) {
  if constexpr (has_header(format)) {
    const __m512 negative = _mm512_sub_ps(_mm512_setzero_ps(), halves(walk.header + 64 + half * 32));
    return _mm512_mul_ps(negative, unsigned_bytes(walk.scales() + 32 + half * 16));
  } else {
    return halves(walk.scales() + 64 + half * 32);
  }
}

}  // namespace
}  // namespace trivet
