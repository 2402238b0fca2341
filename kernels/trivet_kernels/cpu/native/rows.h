// What is done to single rows between the products: norm, rotation, gated activation, and keys and values on their way
// into the cache.
#pragma once

#include <cstdint>

#include "attention.h"

namespace trivet {

// Where the cells of one token and key/value head lie.
struct CachePlace {
  CacheType type;
  void* sub_block;
  int64_t lane;  // of the token in it
};

struct CacheShape {
  CacheType type;
  int64_t block_size, kv_heads, head_size;

  CachePlace place(void* cache, int64_t slot, int64_t kv_head) const {
    const int64_t block = slot / block_size, offset = slot % block_size;
    const int64_t sub = (block * kv_heads + kv_head) * (block_size / SUB_BLOCK) + offset / SUB_BLOCK;
    return {type, static_cast<char*>(cache) + sub * sub_block_bytes(type, head_size), offset % SUB_BLOCK};
  }
};

struct RowKernels {
  // out = x / rms(x) * weight
  void (*rms_norm)(const float* x, const float* weight, float epsilon, int64_t size, float* out);
  // The halves of a head turned by a position's angles, in place (Hugging Face's order).
  void (*rotate)(float* head, const float* cosines, const float* sines, int64_t head_size);
  // gate = silu(gate) * up
  void (*silu_and_multiply)(float* gate, const float* up, int64_t size);
  // The same in each of `rows` rows of [2][size]: gate, then up.
  void (*silu_and_multiply_rows)(float* values, int64_t rows, int64_t size);
  // gate = gelu(gate) * up, by the tangent formula
  void (*gelu_tanh_and_multiply)(float* gate, const float* up, int64_t size);
  // A query row as the attention reads it.
  void (*store_query)(CacheType type, const float* from, int64_t size, void* to);
  // One token's key or value of one head, into the sub-block that holds it.
  void (*write_key)(const CachePlace&, const float* key, int64_t head_size);
  void (*write_value)(const CachePlace&, const float* value, int64_t head_size);
};

// The best ones for this machine.
const RowKernels& row_kernels();

const RowKernels& row_kernels_plain();
const RowKernels& row_kernels_avx2();
const RowKernels& row_kernels_avx512();

}  // namespace trivet
