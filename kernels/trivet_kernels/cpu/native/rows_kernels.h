// The work on rows, in compiler vectors. Included by one file per instruction set, which names its table.
#pragma once

#include <cmath>

#include "rows.h"
#include "vector.h"

namespace trivet {
namespace {

void rms_norm(const float* x, const float* weight, float epsilon, int64_t size, float* out) {
  Floats squares = Floats{};
  int64_t at = 0;
  for (; at + LANES <= size; at += LANES) {
    const Floats values = load(x + at);
    squares += values * values;
  }
  float sum = sum_of(squares);
  for (int64_t rest = at; rest < size; ++rest) {
    sum += x[rest] * x[rest];
  }
  const float factor = 1.0f / std::sqrt(sum / (float)size + epsilon);
  for (at = 0; at + LANES <= size; at += LANES) {
    store(out + at, load(x + at) * factor * load(weight + at));
  }
  for (; at < size; ++at) {
    out[at] = x[at] * factor * weight[at];
  }
}

void rotate(float* head, const float* cosines, const float* sines, int64_t head_size) {
  const int64_t half = head_size / 2;
  int64_t at = 0;
  for (; at + LANES <= half; at += LANES) {
    const Floats first = load(head + at), second = load(head + half + at);
    const Floats cosine = load(cosines + at), sine = load(sines + at);
    store(head + at, first * cosine - second * sine);
    store(head + half + at, second * cosine + first * sine);
  }
  for (; at < half; ++at) {
    const float first = head[at], second = head[half + at];
    head[at] = first * cosines[at] - second * sines[at];
    head[half + at] = second * cosines[at] + first * sines[at];
  }
}

void silu_and_multiply(float* gate, const float* up, int64_t size) {
  const Floats base2 = splat(-1.44269504f), one = splat(1.0f);
  int64_t at = 0;
  for (; at + LANES <= size; at += LANES) {
    const Floats value = load(gate + at);
    Floats exponent = value * base2;
    exponent = exponent > 126.0f ? splat(126.0f) : exponent;
    store(gate + at, value / (one + exp2(exponent)) * load(up + at));
  }
  for (; at < size; ++at) {
    gate[at] = gate[at] / (1.0f + std::exp(-gate[at])) * up[at];
  }
}

// value / (1 + e^(-2u)) is value / 2 * (1 + tanh(u)).
void gelu_tanh_and_multiply(float* gate, const float* up, int64_t size) {
  const float scale = -2.0f * 0.7978845608f, cubic = 0.044715f;
  const Floats base2 = splat(scale * 1.44269504f), one = splat(1.0f);
  int64_t at = 0;
  for (; at + LANES <= size; at += LANES) {
    const Floats value = load(gate + at);
    Floats exponent = value * (one + cubic * value * value) * base2;
    exponent = exponent > 126.0f ? splat(126.0f) : exponent;
    store(gate + at, value / (one + exp2(exponent)) * load(up + at));
  }
  for (; at < size; ++at) {
    const float value = gate[at];
    gate[at] = value / (1.0f + std::exp(scale * value * (1.0f + cubic * value * value))) * up[at];
  }
}

void store_query(CacheType type, const float* from, int64_t size, void* to) {
  if (type == CacheType::float32) {
    std::memcpy(to, from, size * sizeof(float));
    return;
  }
  for (int64_t at = 0; at < size; at += LANES) {
    store_bfloat16(static_cast<Bfloat16*>(to) + at, load(from + at));
  }
}

void write_cache(CacheType type, const float* key, const float* value, int64_t head_size, int64_t block, int64_t offset,
                 int64_t block_size, int64_t kv_heads, int64_t kv_head, void* cache) {
  const int64_t per_block = block_size / SUB_BLOCK, lane = offset % SUB_BLOCK;
  const int64_t begin = ((block * kv_heads + kv_head) * per_block + offset / SUB_BLOCK) * SUB_BLOCK * 2 * head_size;
  if (type == CacheType::float32) {
    float* keys = static_cast<float*>(cache) + begin;
    for (int64_t at = 0; at < head_size; ++at) {
      keys[at * SUB_BLOCK + lane] = key[at];
    }
    std::memcpy(keys + (SUB_BLOCK + lane) * head_size, value, head_size * sizeof(float));
    return;
  }
  Bfloat16* keys = static_cast<Bfloat16*>(cache) + begin;
  Bfloat16* values = keys + SUB_BLOCK * head_size + lane / 2 * head_size * 2 + lane % 2;
  for (int64_t at = 0; at < head_size; at += 2) {
    keys[(at / 2 * SUB_BLOCK + lane) * 2] = to_bfloat16(key[at]);
    keys[(at / 2 * SUB_BLOCK + lane) * 2 + 1] = to_bfloat16(key[at + 1]);
    values[at * 2] = to_bfloat16(value[at]);
    values[at * 2 + 2] = to_bfloat16(value[at + 1]);
  }
}

constexpr RowKernels KERNELS{rms_norm, rotate, silu_and_multiply, gelu_tanh_and_multiply, store_query, write_cache};

}  // namespace
}  // namespace trivet
