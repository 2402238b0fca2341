#include "attention.h"

#include "isa.h"

namespace trivet {

int64_t attention_scratch_bytes(int64_t head_size) {
  const int64_t by_head = ROWS_TOGETHER + 2 * MOST_ROWS + 2 * SUB_BLOCK + 3 * ATTENTION_CHUNK;
  return (ROWS_TOGETHER * SCORE_STRIDE + by_head * head_size + 2 * ATTENTION_CHUNK + 2 * MOST_ROWS) * 4 + 1024;
}

const AttentionKernels& attention_kernels(CacheType type) {
  const bool is_int8 = trivet::is_int8(type);
#if defined(__x86_64__)
  const Isa isa = isa_in_use();
  if (multiplies_float32(type)) {
    if (isa >= Isa::avx512) return attention_avx512_float32(is_int8);
    if (isa == Isa::avx2) return attention_avx2_float32(is_int8);
  } else {
    if (isa == Isa::amx) return attention_amx_bfloat16(is_int8);
    if (isa == Isa::avx512 && cpu_features().avx512_bf16) return attention_avx512_bfloat16(is_int8);
    if (isa >= Isa::avx2) return attention_avx2_bfloat16(is_int8);
  }
#endif
  return multiplies_float32(type) ? attention_plain_float32(is_int8) : attention_plain_bfloat16(is_int8);
}

}  // namespace trivet
