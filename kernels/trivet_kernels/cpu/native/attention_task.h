// The walk of one attention task, over an engine that multiplies. Included by one file per instruction set.
//
// Engine: types Cell (cache and query) and Weight (probabilities as the second product wants them), and
//   scores(query [rows][D], rows, D, keys[count], count, s, stride): s[row][16 * i + lane] = query · key of lane of
//   sub-block i values(p [rows][stride], rows, stride, values[count], count, D, out [rows][D]): out = p · values
// with rows a multiple of 16 and count a multiple of 2 (a missing sub-block is a zeroed one).
#pragma once

#include <limits>

#include "attention.h"
#include "vector.h"

namespace trivet {
namespace {

constexpr int64_t CHUNK_SUB_BLOCKS = ATTENTION_CHUNK / SUB_BLOCK;

template <typename Engine>
struct Scratch {
  using Cell = typename Engine::Cell;
  using Weight = typename Engine::Weight;

  float* scores;    // [MOST_ROWS][CHUNK]
  Weight* weights;  // [MOST_ROWS][CHUNK]
  Cell* query;      // [MOST_ROWS][D]
  float* partial;   // [MOST_ROWS][D]
  float* total;     // [MOST_ROWS][D]
  Cell* zeros;      // one sub-block: [16][2 * D]
  float* greatest;  // [MOST_ROWS]
  float* sums;      // [MOST_ROWS]

  Scratch(void* memory, int64_t head_size) {
    char* at = static_cast<char*>(memory);
    auto take = [&at](int64_t bytes) {
      char* taken = at;
      at += (bytes + 63) / 64 * 64;
      return taken;
    };
    scores = reinterpret_cast<float*>(take(MOST_ROWS * ATTENTION_CHUNK * 4));
    weights = reinterpret_cast<Weight*>(take(MOST_ROWS * ATTENTION_CHUNK * 4));
    query = reinterpret_cast<Cell*>(take(MOST_ROWS * head_size * 4));
    partial = reinterpret_cast<float*>(take(MOST_ROWS * head_size * 4));
    total = reinterpret_cast<float*>(take(MOST_ROWS * head_size * 4));
    zeros = reinterpret_cast<Cell*>(take(SUB_BLOCK * 2 * head_size * 4));
    greatest = reinterpret_cast<float*>(take(MOST_ROWS * 4));
    sums = reinterpret_cast<float*>(take(MOST_ROWS * 4));
  }
};

// One row of a chunk: scores in, unnormalised probabilities out; the first `seen` of `width` lanes count. Gives the
// greatest score and sum.
template <typename Engine>
inline void soften(const float* scores, typename Engine::Weight* weights, int64_t width, int64_t seen, float scale,
                   float& greatest, float& sum) {
  const float base2 = 1.44269504f;
  const Floats none = splat(-std::numeric_limits<float>::infinity());
  Floats most = none;
  for (int64_t at = 0; at < width; at += LANES) {
    const Ints place = lane_numbers() + (int32_t)at;
    most = max(most, select(place < (int32_t)seen, load(scores + at), none));
  }
  greatest = max_of(most);
  const Floats factor = splat(scale * base2), shift = splat(greatest * scale * base2);
  Floats sums = Floats{};
  for (int64_t at = 0; at < width; at += LANES) {
    const Ints place = lane_numbers() + (int32_t)at;
    const Floats weight = select(place < (int32_t)seen, exp2(load(scores + at) * factor - shift), Floats{});
    sums += weight;
    Engine::store_weights(weights + at, weight);
  }
  sum = sum_of(sums);
  greatest *= scale;
}

// total = the chunks so far and this one, each weighed by its greatest score.
inline void merge(float* total, const float* partial, int64_t head_size, float& greatest, float& sum,
                  float new_greatest, float new_sum) {
  const float infinity = std::numeric_limits<float>::infinity();
  if (new_greatest == -infinity) {
    return;  // nothing of this chunk is seen
  }
  if (greatest == -infinity) {
    greatest = new_greatest;
    sum = new_sum;
    std::memcpy(total, partial, head_size * sizeof(float));
    return;
  }
  const float both = greatest > new_greatest ? greatest : new_greatest;
  const float base2 = 1.44269504f;
  const float before = exp2((greatest - both) * base2), now = exp2((new_greatest - both) * base2);
  for (int64_t at = 0; at < head_size; at += LANES) {
    store(total + at, load(total + at) * before + load(partial + at) * now);
  }
  sum = sum * before + new_sum * now;
  greatest = both;
}

template <typename Engine>
void attend(const AttentionTask& task, void* memory) {
  using Cell = typename Engine::Cell;
  const int64_t size = task.head_size, rows = task.tokens * task.group;
  const int64_t padded = (rows + 15) / 16 * 16;
  Scratch<Engine> scratch(memory, size);
  std::memset(scratch.zeros, 0, SUB_BLOCK * 2 * size * sizeof(Cell));
  for (int64_t row = 0; row < rows; ++row) {
    const Cell* from =
        static_cast<const Cell*>(task.query) + row / task.group * task.query_stride + row % task.group * size;
    std::memcpy(scratch.query + row * size, from, size * sizeof(Cell));
    scratch.greatest[row] = -std::numeric_limits<float>::infinity();
    scratch.sums[row] = 0;
  }
  std::memset(scratch.query + rows * size, 0, (padded - rows) * size * sizeof(Cell));
  std::memset(scratch.total, 0, rows * size * sizeof(float));

  const int64_t length = task.first_position + task.tokens;  // what the last token sees
  const int64_t per_block = task.block_size / SUB_BLOCK;
  const Cell* cache = static_cast<const Cell*>(task.cache);
  Engine engine;
  for (int64_t chunk = 0; chunk < length; chunk += ATTENTION_CHUNK) {
    const int64_t end = chunk + ATTENTION_CHUNK < length ? chunk + ATTENTION_CHUNK : length;
    const int64_t used = (end - chunk + SUB_BLOCK - 1) / SUB_BLOCK, count = (used + 1) / 2 * 2,
                  width = count * SUB_BLOCK;
    const Cell* keys[CHUNK_SUB_BLOCKS];
    const Cell* values[CHUNK_SUB_BLOCKS];
    for (int64_t index = 0; index < count; ++index) {
      const int64_t sub = chunk / SUB_BLOCK + index;
      const Cell* at = scratch.zeros;
      if (index < used) {
        const int64_t block = task.blocks[sub / per_block];
        at = cache + ((block * task.kv_heads + task.kv_head) * per_block + sub % per_block) * SUB_BLOCK * 2 * size;
      }
      keys[index] = at;
      values[index] = at + SUB_BLOCK * size;
    }
    engine.scores(scratch.query, padded, size, keys, count, scratch.scores, ATTENTION_CHUNK);
    float greatest[MOST_ROWS], sums[MOST_ROWS];
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t seen = task.first_position + row / task.group + 1 - chunk;
      soften<Engine>(scratch.scores + row * ATTENTION_CHUNK, scratch.weights + row * ATTENTION_CHUNK, width,
                     seen < width ? seen : width, task.scale, greatest[row], sums[row]);
    }
    for (int64_t row = rows; row < padded; ++row) {
      std::memset(scratch.weights + row * ATTENTION_CHUNK, 0, width * sizeof(typename Engine::Weight));
    }
    engine.values(scratch.weights, padded, ATTENTION_CHUNK, values, count, size, scratch.partial);
    for (int64_t row = 0; row < rows; ++row) {
      merge(scratch.total + row * size, scratch.partial + row * size, size, scratch.greatest[row], scratch.sums[row],
            greatest[row], sums[row]);
    }
  }
  for (int64_t row = 0; row < rows; ++row) {
    float* to = task.output + row / task.group * task.output_stride + row % task.group * size;
    const Floats share = splat(1.0f / scratch.sums[row]);
    for (int64_t at = 0; at < size; at += LANES) {
      store(to + at, load(scratch.total + row * size + at) * share);
    }
  }
}

}  // namespace
}  // namespace trivet
