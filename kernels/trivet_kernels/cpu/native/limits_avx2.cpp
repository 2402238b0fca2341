// The loops on 256-bit vectors.
#include <immintrin.h>

#include "limits.h"

namespace trivet {
namespace {

int64_t read(const uint8_t* from, int64_t bytes) {
  __m256i sums[8];
  for (auto& sum : sums) sum = _mm256_setzero_si256();
  for (int64_t i = 0; i < bytes; i += 256) {
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) {
      sums[j] = _mm256_xor_si256(sums[j], _mm256_load_si256(reinterpret_cast<const __m256i*>(from + i + j * 32)));
    }
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) _mm_prefetch(from + i + j * 64 + 8192, _MM_HINT_T0);
  }
  for (int j = 1; j < 8; ++j) sums[0] = _mm256_xor_si256(sums[0], sums[j]);
  return _mm256_extract_epi64(sums[0], 0) ^ _mm256_extract_epi64(sums[0], 2);
}

// Written as instructions, as in limits_avx512.cpp. A byte product is made as the products make it, without what it
// costs to mend signs: two bytes into 16 bits, two of those into 32.
#define EACH(of) of(4) of(5) of(6) of(7) of(8) of(9) of(10) of(11) of(12) of(13) of(14) of(15)
#define CLEAR(n) "vpxor %%ymm" #n ", %%ymm" #n ", %%ymm" #n "\n"
#define FMA(n) "vfmadd231ps %1, %2, %%ymm" #n "\n"
#define DOT_INT8(n) \
  "vpmaddubsw %1, %2, %%ymm3\n vpmaddwd %%ymm3, %2, %%ymm3\n vpaddd %%ymm3, %%ymm" #n ", %%ymm" #n "\n"
#define PRODUCT_LOOP(name, PRODUCT, x_bits, y_bits)                                                                  \
  void name(int64_t turns) {                                                                                         \
    const __m256i x = _mm256_set1_epi32(x_bits), y = _mm256_set1_epi32(y_bits);                                      \
    asm volatile(EACH(CLEAR) "1:\n" EACH(PRODUCT) "dec %0\n jnz 1b\n"                                                \
                 : "+r"(turns)                                                                                       \
                 : "x"(x), "x"(y)                                                                                    \
                 : "cc", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", \
                   "xmm14", "xmm15");                                                                                \
  }

PRODUCT_LOOP(products_f32, FMA, 0x3ebd70a4, 0x3f35c28f)  // 0.37 · 0.71
PRODUCT_LOOP(products_i8, DOT_INT8, 0x11223344, 0x01010101)

}  // namespace

ReadLoop read_loop_avx2() { return read; }

// There are no products of bf16 here: they are made of floats.
ProductLoop product_loop_avx2(LimitFormat format) {
  if (format == LimitFormat::i8) return {products_i8, 12 * 32 * 2};
  return {products_f32, 12 * 8 * 2};
}

}  // namespace trivet
