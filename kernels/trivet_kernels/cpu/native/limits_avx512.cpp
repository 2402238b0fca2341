// The loops on 512-bit vectors.
#include <immintrin.h>

#include "limits.h"

namespace trivet {
namespace {

constexpr int ACCUMULATORS = 16;  // enough to hide what an instruction takes

int64_t read(const uint8_t* from, int64_t bytes) {
  __m512i sums[8];
  for (auto& sum : sums) sum = _mm512_setzero_si512();
  for (int64_t i = 0; i < bytes; i += 512) {
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) {
      sums[j] = _mm512_xor_si512(sums[j], _mm512_load_si512(from + i + j * 64));
      _mm_prefetch(from + i + j * 64 + 8192, _MM_HINT_T0);
    }
  }
  for (int j = 1; j < 8; ++j) sums[0] = _mm512_xor_si512(sums[0], sums[j]);
  return _mm512_reduce_add_epi64(sums[0]);
}

// Written as instructions, from the first zero to the last jump: what a compiler makes of so many accumulators moves
// some of them through memory. Values like those of real work: zeros draw less power and run faster.
#define EACH(of) \
  of(16) of(17) of(18) of(19) of(20) of(21) of(22) of(23) of(24) of(25) of(26) of(27) of(28) of(29) of(30) of(31)
#define CLEAR(n) "vpxord %%zmm" #n ", %%zmm" #n ", %%zmm" #n "\n"
#define FMA(n) "vfmadd231ps %1, %2, %%zmm" #n "\n"
#define DOT_BF16(n) "vdpbf16ps %1, %2, %%zmm" #n "\n"
#define DOT_INT8(n) "vpdpbusd %1, %2, %%zmm" #n "\n"
#define PRODUCT_LOOP(name, PRODUCT, x_bits, y_bits)                                                                \
  void name(int64_t turns) {                                                                                       \
    const __m512i x = _mm512_set1_epi32(x_bits), y = _mm512_set1_epi32(y_bits);                                    \
    asm volatile(EACH(CLEAR) "1:\n" EACH(PRODUCT) "dec %0\n jnz 1b\n"                                              \
                 : "+r"(turns)                                                                                     \
                 : "v"(x), "v"(y)                                                                                  \
                 : "cc", "xmm16", "xmm17", "xmm18", "xmm19", "xmm20", "xmm21", "xmm22", "xmm23", "xmm24", "xmm25", \
                   "xmm26", "xmm27", "xmm28", "xmm29", "xmm30", "xmm31");                                          \
  }

PRODUCT_LOOP(products_f32, FMA, 0x3ebd70a4, 0x3f35c28f)        // 0.37 · 0.71
PRODUCT_LOOP(products_bf16, DOT_BF16, 0x3ebd3ebd, 0x3f353f35)  // the same in pairs
PRODUCT_LOOP(products_i8, DOT_INT8, 0x11223344, 0x15263748)

}  // namespace

ReadLoop read_loop_avx512() { return read; }

ProductLoop product_loop_avx512(LimitFormat format, bool has_bf16, bool has_vnni) {
  if (format == LimitFormat::bf16 && has_bf16) return {products_bf16, ACCUMULATORS * 32 * 2};
  if (format == LimitFormat::i8) {
    return has_vnni ? ProductLoop{products_i8, ACCUMULATORS * 64 * 2} : product_loop_avx2(format);
  }
  return {products_f32, ACCUMULATORS * 16 * 2};
}

}  // namespace trivet
