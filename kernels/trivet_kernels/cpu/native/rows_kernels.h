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
  if (multiplies_float32(type)) {
    std::memcpy(to, from, size * sizeof(float));
    return;
  }
  for (int64_t at = 0; at < size; at += LANES) {
    store_bfloat16(static_cast<Bfloat16*>(to) + at, load(from + at));
  }
}

// Whole numbers to 127 and what one of them is worth; NaN and infinity become a scale that spoils the token.
float quantise(const float* from, int64_t size, int8_t* to) {
  float greatest = 0, spoiled = 0;
  for (int64_t at = 0; at < size; ++at) {
    const float value = __builtin_fabsf(from[at]);
    greatest = value > greatest ? value : greatest;
    spoiled += value * 0.0f;  // NaN where it is not finite
  }
  const float inverse = greatest > 0 ? 127.0f / greatest : 0.0f;
  for (int64_t at = 0; at < size; ++at) {
    to[at] = spoiled == 0 ? (int8_t)__builtin_rintf(from[at] * inverse) : 0;
  }
  return spoiled == 0 ? greatest / 127.0f : spoiled;
}

// A cell's place in a sub-block, keys and values apart, in the order of the type that multiplies.
template <typename Cell>
void put_key(Cell* keys, int64_t lane, int64_t at, int64_t depth, Cell cell) {
  keys[(at / depth * SUB_BLOCK + lane) * depth + at % depth] = cell;
}
template <typename Cell>
void put_value(Cell* values, int64_t lane, int64_t at, int64_t depth, int64_t head_size, Cell cell) {
  values[(lane / depth * head_size + at) * depth + lane % depth] = cell;
}

void write_cache(CacheType type, const float* key, const float* value, int64_t head_size, int64_t block, int64_t offset,
                 int64_t block_size, int64_t kv_heads, int64_t kv_head, void* cache) {
  const int64_t per_block = block_size / SUB_BLOCK, lane = offset % SUB_BLOCK;
  const int64_t sub = (block * kv_heads + kv_head) * per_block + offset / SUB_BLOCK;
  char* place = static_cast<char*>(cache) + sub * sub_block_bytes(type, head_size);
  if (is_int8(type)) {
    const int64_t depth = type == CacheType::int8_float32 ? 1 : 2;
    float* scales = reinterpret_cast<float*>(place);
    int8_t* keys = reinterpret_cast<int8_t*>(scales + 2 * SUB_BLOCK);
    int8_t* values = keys + SUB_BLOCK * head_size;
    int8_t cells[MOST_HEAD_SIZE];
    scales[lane] = quantise(key, head_size, cells);
    for (int64_t at = 0; at < head_size; ++at) {
      put_key(keys, lane, at, depth, cells[at]);
    }
    scales[SUB_BLOCK + lane] = quantise(value, head_size, cells);
    for (int64_t at = 0; at < head_size; ++at) {
      put_value(values, lane, at, depth, head_size, cells[at]);
    }
    return;
  }
  if (type == CacheType::float32) {
    float* keys = reinterpret_cast<float*>(place);
    for (int64_t at = 0; at < head_size; ++at) {
      put_key(keys, lane, at, 1, key[at]);
    }
    std::memcpy(keys + (SUB_BLOCK + lane) * head_size, value, head_size * sizeof(float));
    return;
  }
  Bfloat16* keys = reinterpret_cast<Bfloat16*>(place);
  Bfloat16* values = keys + SUB_BLOCK * head_size;
  for (int64_t at = 0; at < head_size; ++at) {
    put_key(keys, lane, at, 2, to_bfloat16(key[at]));
    put_value(values, lane, at, 2, head_size, to_bfloat16(value[at]));
  }
}

constexpr RowKernels KERNELS{rms_norm, rotate, silu_and_multiply, gelu_tanh_and_multiply, store_query, write_cache};

}  // namespace
}  // namespace trivet
