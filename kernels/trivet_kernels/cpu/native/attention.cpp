#include "attention.h"

#include "isa.h"

namespace trivet {

int64_t attention_scratch_bytes(int64_t head_size) {
  return MOST_ROWS * ATTENTION_CHUNK * 8 + (3 * MOST_ROWS + 2 * SUB_BLOCK) * head_size * 4 + MOST_ROWS * 8 + 16 * 64;
}

Attend choose_attention(CacheType type) {
#if defined(__x86_64__)
  const Isa isa = isa_in_use();
  if (type == CacheType::float32) return isa >= Isa::avx512 ? attention_avx512_float32() : attention_plain_float32();
  if (isa == Isa::amx) return attention_amx_bfloat16();
  if (isa >= Isa::avx512 && cpu_features().avx512_bf16) return attention_avx512_bfloat16();
#endif
  return type == CacheType::float32 ? attention_plain_float32() : attention_plain_bfloat16();
}

}  // namespace trivet
