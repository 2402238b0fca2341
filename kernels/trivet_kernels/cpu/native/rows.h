// What is done to single rows between the products: norm, rotation, gated activation, and keys and values on their way
// into the cache.
#pragma once

#include <cstdint>

#include "attention.h"

namespace trivet {

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
  // One token's key and value of one head, into its place of the sub-block that holds it.
  void (*write_cache)(CacheType type, const float* key, const float* value, int64_t head_size, int64_t block,
                      int64_t offset, int64_t block_size, int64_t kv_heads, int64_t kv_head, void* cache);
};

// The best ones for this machine.
const RowKernels& row_kernels();

const RowKernels& row_kernels_plain();
const RowKernels& row_kernels_avx2();
const RowKernels& row_kernels_avx512();

}  // namespace trivet
