// The work on rows, in compiler vectors. Included by one file per instruction set, which names its table.
#pragma once

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

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

// value / (1 + 2^exponent)
inline Floats damped(Floats value, Floats exponent) {
#if defined(__AVX512F__)
  // Scaling by a power of two and the reciprocal have instructions here: half the time of what follows. The bounds
  // keep 1 + 2^exponent finite; NaN passes them.
  __m512 bounded = _mm512_min_ps(_mm512_set1_ps(126.0f), (__m512)exponent);
  bounded = _mm512_max_ps(_mm512_set1_ps(-126.0f), bounded);
  const __m512 whole = _mm512_roundscale_ps(bounded, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 power = _mm512_scalef_ps((__m512)exp2_of_part((Floats)_mm512_sub_ps(bounded, whole)), whole);
  const __m512 one = _mm512_set1_ps(1.0f), divisor = _mm512_add_ps(one, power);
  const __m512 guess = _mm512_rcp14_ps(divisor);
  return value * (Floats)_mm512_fmadd_ps(guess, _mm512_fnmadd_ps(divisor, guess, one), guess);
#else
  exponent = exponent > 126.0f ? splat(126.0f) : exponent;
  return value / (splat(1.0f) + exp2(exponent));
#endif
}

inline Floats silu(Floats value) { return damped(value, value * -1.44269504f); }

// value / (1 + e^(-2u)) is value / 2 * (1 + tanh(u)).
inline Floats gelu_tanh(Floats value) {
  return damped(value, value * (1.0f + 0.044715f * value * value) * (-2.0f * 0.7978845608f * 1.44269504f));
}

// gate = activation(gate) * up
template <typename Activation>
inline void gate_row(float* gate, const float* up, int64_t size, Activation activation) {
  int64_t at = 0;
  for (; at + LANES <= size; at += LANES) {
    store(gate + at, activation(load(gate + at)) * load(up + at));
  }
  for (; at < size; ++at) {
    gate[at] = activation(splat(gate[at]))[0] * up[at];
  }
}

void silu_and_multiply(float* gate, const float* up, int64_t size) {
  gate_row(gate, up, size, [](Floats value) { return silu(value); });
}

void silu_and_multiply_rows(float* values, int64_t rows, int64_t size) {
  if (size == LANES) {  // without a loop in each row, of which there are many
    for (int64_t row = 0; row < rows; ++row, values += 2 * LANES) {
      store(values, silu(load(values)) * load(values + LANES));
    }
    return;
  }
  for (int64_t row = 0; row < rows; ++row, values += 2 * size) {
    gate_row(values, values + size, size, [](Floats value) { return silu(value); });
  }
}

void gelu_tanh_and_multiply(float* gate, const float* up, int64_t size) {
  gate_row(gate, up, size, [](Floats value) { return gelu_tanh(value); });
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
inline int64_t key_place(int64_t lane, int64_t at, int64_t depth) {
  return (at / depth * SUB_BLOCK + lane) * depth + at % depth;
}
inline int64_t value_place(int64_t lane, int64_t at, int64_t depth, int64_t head_size) {
  return (lane / depth * head_size + at) * depth + lane % depth;
}

// NaN stays NaN.
inline void round_row(const float* from, int64_t size, Bfloat16* to) {
  for (int64_t at = 0; at < size; at += LANES) {
    const Floats values = load(from + at);
    store_bfloat16(to + at, select(values == values, values, splat(NAN)));
  }
}

// One token's numbers of int8, and their scale, into a sub-block; `place_of(at, depth)` says where.
template <typename PlaceOf>
inline void write_int8(CacheType type, const float* from, int64_t size, int8_t* to, float* scale, PlaceOf place_of) {
  const int64_t depth = type == CacheType::int8_float32 ? 1 : 2;
  int8_t cells[MOST_HEAD_SIZE];
  *scale = quantise(from, size, cells);
  for (int64_t at = 0; at < size; ++at) {
    const int64_t place = place_of(at, depth);
    to[depth == 2 ? int8_place(place) : place] = cells[at];
  }
}

void write_key(const CachePlace& place, const float* key, int64_t size) {
  const int64_t lane = place.lane;
  if (is_int8(place.type)) {
    float* scales = static_cast<float*>(place.sub_block);
    write_int8(place.type, key, size, reinterpret_cast<int8_t*>(scales + 2 * SUB_BLOCK), scales + lane,
               [&](int64_t at, int64_t depth) { return key_place(lane, at, depth); });
    return;
  }
  if (place.type == CacheType::float32) {
    float* keys = static_cast<float*>(place.sub_block);
    for (int64_t at = 0; at < size; ++at) {
      keys[key_place(lane, at, 1)] = key[at];
    }
    return;
  }
  Bfloat16* keys = static_cast<Bfloat16*>(place.sub_block);
  Bfloat16 cells[MOST_HEAD_SIZE];
  round_row(key, size, cells);
  for (int64_t at = 0; at < size; at += 2) {  // pairs of dimensions lie together
    std::memcpy(keys + key_place(lane, at, 2), cells + at, 2 * sizeof(Bfloat16));
  }
}

void write_value(const CachePlace& place, const float* value, int64_t size) {
  const int64_t lane = place.lane;
  if (is_int8(place.type)) {
    float* scales = static_cast<float*>(place.sub_block);
    int8_t* values = reinterpret_cast<int8_t*>(scales + 2 * SUB_BLOCK) + SUB_BLOCK * size;
    write_int8(place.type, value, size, values, scales + SUB_BLOCK + lane,
               [&](int64_t at, int64_t depth) { return value_place(lane, at, depth, size); });
    return;
  }
  if (place.type == CacheType::float32) {
    std::memcpy(static_cast<float*>(place.sub_block) + (SUB_BLOCK + lane) * size, value, size * sizeof(float));
    return;
  }
  Bfloat16* values = static_cast<Bfloat16*>(place.sub_block) + SUB_BLOCK * size;
  Bfloat16 cells[MOST_HEAD_SIZE];
  round_row(value, size, cells);
  for (int64_t at = 0; at < size; ++at) {
    values[value_place(lane, at, 2, size)] = cells[at];
  }
}

constexpr RowKernels KERNELS{rms_norm,    rotate,    silu_and_multiply, silu_and_multiply_rows, gelu_tanh_and_multiply,
                             store_query, write_key, write_value};

}  // namespace
}  // namespace trivet
