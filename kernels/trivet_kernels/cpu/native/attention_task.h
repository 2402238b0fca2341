// The walk of one attention task, over an engine that multiplies. Included by one file per instruction set.
//
// Engine(rows of the task) has the types Cell (cache and query) and Weight (probabilities as the second product wants
// them), and
//   scores(query [rows][D], rows, D, chunk, s [rows][SCORE_STRIDE]): s[row][16 · i + lane] = query · key of lane of
//     sub-block i
//   values(p [rows][weight_stride<Weight>], rows, D, chunk, out [rows][D]): out = p · values
//   take(chunk, D, memory): called once a chunk before them, with memory for the chunk's values
//   power(x) = 2^x for x <= 0, exactly 1 at 0
//   widen(cells, count, to): int8 as Cell, a multiple of 64 of them; where TAKES_INT8, `take` does so with values
// for up to ROWS_TOGETHER rows and an even number of sub-blocks (a missing one is zeroed).
#pragma once

#include <limits>

#include "attention.h"
#include "vector.h"

namespace trivet {
namespace {

constexpr int64_t CHUNK_SUB_BLOCKS = ATTENTION_CHUNK / SUB_BLOCK;
constexpr float BASE_2 = 1.44269504f;
constexpr float NO_SCORE = -std::numeric_limits<float>::infinity();

// Memory that will be read soon.
struct Ahead {
  const char* const* places = nullptr;  // by sub-block; null: nowhere
  int64_t count = 0, offset = 0, bytes = 0;

  // Into the second cache: the first has room for what is being worked on. Inlined, or GCC takes it for a function
  // without effect and leaves its calls out.
  [[gnu::always_inline]] void touch(int64_t sub) const {
    if (sub < count) {
      for (int64_t at = 0; at < bytes; at += 64) {
        __builtin_prefetch(places[sub] + offset + at, 0, 2);
      }
    }
  }
};

template <typename Cell>
struct Chunk {
  const Cell* keys[CHUNK_SUB_BLOCKS];
  const Cell* values[CHUNK_SUB_BLOCKS];
  const int8_t* int8_values[CHUNK_SUB_BLOCKS];  // instead, for an engine that takes them
  int64_t count;                                // of sub-blocks, even
  const float *key_scales, *value_scales;       // [ATTENTION_CHUNK]; null: none
};

// Probabilities take the place of a row's scores.
template <typename Weight>
constexpr int64_t weight_stride = SCORE_STRIDE * (int64_t)sizeof(float) / (int64_t)sizeof(Weight);

template <typename Engine>
struct Scratch {
  using Cell = typename Engine::Cell;
  using Weight = typename Engine::Weight;

  float* scores;    // [ROWS_TOGETHER][SCORE_STRIDE]
  Weight* weights;  // there too
  float* partial;   // [ROWS_TOGETHER][D]
  Cell* query;      // [MOST_ROWS][D]
  float* total;     // [MOST_ROWS][D]
  Cell* zeros;      // one sub-block: [16][2 · D]; as the memory came
  Cell* widened;    // a chunk of sub-blocks, out of int8
  Cell* values;     // the engine's
  float* scales;    // [2][CHUNK]
  float* greatest;  // [MOST_ROWS]
  float* sums;      // [MOST_ROWS]

  Scratch(void* memory, int64_t head_size) {
    char* at = static_cast<char*>(memory);
    auto take = [&at](int64_t bytes) {
      char* taken = at;
      at += (bytes + 63) / 64 * 64;
      return taken;
    };
    scores = reinterpret_cast<float*>(take(ROWS_TOGETHER * SCORE_STRIDE * 4));
    weights = reinterpret_cast<Weight*>(scores);
    partial = reinterpret_cast<float*>(take(ROWS_TOGETHER * head_size * 4));
    query = reinterpret_cast<Cell*>(take(MOST_ROWS * head_size * 4));
    total = reinterpret_cast<float*>(take(MOST_ROWS * head_size * 4));
    zeros = reinterpret_cast<Cell*>(take(SUB_BLOCK * 2 * head_size * 4));
    widened = reinterpret_cast<Cell*>(take(ATTENTION_CHUNK * 2 * head_size * 4));
    values = reinterpret_cast<Cell*>(take(ATTENTION_CHUNK * head_size * 4));
    scales = reinterpret_cast<float*>(take(2 * ATTENTION_CHUNK * 4));
    greatest = reinterpret_cast<float*>(take(MOST_ROWS * 4));
    sums = reinterpret_cast<float*>(take(MOST_ROWS * 4));
  }
};

// Scores of whole vectors times the scales of their keys, and capped.
template <bool quantised>
[[gnu::noinline]] void adjust(float* scores, int64_t begin, int64_t end, const float* key_scales, float scale,
                              float soft_cap) {
  const Floats factor = splat(scale * 2.0f * BASE_2 / soft_cap), one = splat(1.0f);
  for (int64_t at = begin; at < end; at += LANES) {
    Floats score = load(scores + at);
    if (quantised) {
      score = score * load(key_scales + at);
    }
    if (soft_cap > 0) {  // cap · tanh(x / cap), of which the exponential stays finite
      Floats exponent = score * factor;
      exponent = exponent > 80.0f ? splat(80.0f) : exponent;
      score = soft_cap * (one - splat(2.0f) / (exp2(exponent) + one));
    }
    store(scores + at, score);
  }
}

// Which lanes of a chunk a row sees, [first, last), in steps of two vectors: [begin, end) have something to see, and in
// [open, shut) all is seen.
struct SeenLanes {
  static constexpr int64_t STEP = 2 * LANES;

  SeenLanes() = default;
  SeenLanes(int64_t from, int64_t to) : first(from), last(to) {
    if (first >= last) {
      return;
    }
    begin = first / STEP * STEP;
    end = (last + STEP - 1) / STEP * STEP;
    open = (first + STEP - 1) / STEP * STEP;
    shut = last / STEP * STEP;
    if (open > shut) {
      open = shut = end;
    }
  }
  bool nothing() const { return end == 0; }

  // Calls `some(at)` and `all(at)` for the steps from begin to end.
  template <typename Some, typename All>
  [[gnu::always_inline]] void each(Some some, All all) const {
    for (int64_t at = begin; at < open; at += STEP) {
      some(at);
    }
    for (int64_t at = open; at < shut; at += STEP) {
      all(at);
    }
    for (int64_t at = shut > open ? shut : open; at < end; at += STEP) {
      some(at);
    }
  }
  Ints mask(int64_t at) const {
    const Ints place = lane_numbers() + (int32_t)at;
    return (place >= (int32_t)first) & (place < (int32_t)last);
  }

  int64_t first = 0, last = 0, begin = 0, end = 0, open = 0, shut = 0;
};

// The greatest score of a row that sees something.
inline float greatest_of(const float* scores, const SeenLanes& seen) {
  const Floats none = splat(NO_SCORE);
  Floats most = none, second = none;
  seen.each(
      [&](int64_t at) {
        for (int64_t lane = at; lane < at + SeenLanes::STEP; lane += LANES) {
          most = max(select(seen.mask(lane), load(scores + lane), none), most);
        }
      },
      [&](int64_t at) {
        most = max(load(scores + at), most);
        second = max(load(scores + at + LANES), second);
      });
  return max_of(max(most, second));
}

// One row of a chunk: scores in, unnormalised probabilities out, `width` of them, to the same place. Gives their sum,
// which is 0 only when nothing is seen.
template <typename Engine, bool quantised>
inline float soften(const float* scores, typename Engine::Weight* weights, int64_t width, const SeenLanes& seen,
                    const Chunk<typename Engine::Cell>& chunk, float scale, float greatest) {
  const Floats factor = splat(scale * BASE_2), shift = splat(greatest * BASE_2);
  Floats sums = Floats{}, others = Floats{};
  const auto power = [&](int64_t at) { return Engine::power(load(scores + at) * factor - shift); };
  const auto put = [&](int64_t at, Floats one, Floats two) {
    sums += one;
    others += two;
    Engine::store_weights(weights + at, quantised ? one * load(chunk.value_scales + at) : one);
    Engine::store_weights(weights + at + LANES, quantised ? two * load(chunk.value_scales + at + LANES) : two);
  };
  for (int64_t at = 0; at < seen.begin; at += LANES) {
    Engine::store_weights(weights + at, Floats{});
  }
  seen.each(
      [&](int64_t at) {
        put(at, select(seen.mask(at), power(at), Floats{}), select(seen.mask(at + LANES), power(at + LANES), Floats{}));
      },
      [&](int64_t at) { put(at, power(at), power(at + LANES)); });
  for (int64_t at = seen.end; at < width; at += LANES) {
    Engine::store_weights(weights + at, Floats{});
  }
  return sum_of(sums + others);
}

// Sixteen rows' results so far and those of one chunk more: gives what each is weighed by, and updates score and sum.
[[gnu::noinline]] void weigh(float* greatest, float* sums, const float* new_greatest, const float* new_sums,
                             float* before, float* now) {
  const Floats old = load(greatest), fresh = load(new_greatest), old_sum = load(sums), fresh_sum = load(new_sums);
  const Ints is_first = old_sum == 0.0f, is_unseen = fresh_sum == 0.0f;
  const Floats both = max(fresh, old);
  const Floats old_weight = select(is_first, Floats{}, exp2((old - both) * BASE_2));
  const Floats fresh_weight = select(is_unseen, Floats{}, exp2((fresh - both) * BASE_2));
  store(before, old_weight);
  store(now, fresh_weight);
  store(sums, old_sum * old_weight + fresh_sum * fresh_weight);
  store(greatest, both);
}

[[gnu::noinline]] void merge(float* total, const float* partial, int64_t head_size, float before, float now) {
  if (now == 0.0f) {
    return;  // nothing of this chunk is seen
  }
  for (int64_t at = 0; at < head_size; at += LANES) {
    store(total + at, load(total + at) * before + load(partial + at) * now);
  }
}

[[gnu::noinline]] void finish_row(const float* total, float sum, int64_t head_size, void* output, bool is_bfloat16) {
  const Floats share = splat(sum == 0.0f ? 0.0f : 1.0f / sum);  // 0: a row that sees nothing
  for (int64_t at = 0; at < head_size; at += LANES) {
    const Floats values = load(total + at) * share;
    if (is_bfloat16) {
      store_bfloat16(static_cast<Bfloat16*>(output) + at, values);
    } else {
      store(static_cast<float*>(output) + at, values);
    }
  }
}

void fold(const float* partials, int64_t chunks, int64_t head_size, void* output, bool is_bfloat16) {
  float total[MOST_HEAD_SIZE] = {}, greatest[LANES], sums[LANES] = {}, new_greatest[LANES], new_sums[LANES] = {};
  store(greatest, splat(NO_SCORE));
  store(new_greatest, splat(NO_SCORE));
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    const float* partial = partials + chunk * partial_stride(head_size);
    float before[LANES], now[LANES];
    new_greatest[0] = partial[head_size];
    new_sums[0] = partial[head_size + 1];
    weigh(greatest, sums, new_greatest, new_sums, before, now);
    merge(total, partial, head_size, before[0], now[0]);
  }
  finish_row(total, sums[0], head_size, output, is_bfloat16);
}

// Where the cache has keys and values of a head.
struct Places {
  const AttentionTask& task;
  int64_t sub_bytes;

  // The sub-blocks of the chunk that begins at `start` of which somebody sees something, from an even one on, so that
  // pairs are the same in every task. Returns how many.
  int64_t list(const SeenPositions& seen, int64_t start, const char** at) const {
    const int64_t per_block = task.block_size / SUB_BLOCK;
    const int64_t begin = (seen.begin > start ? (seen.begin - start) / SUB_BLOCK / 2 * 2 : 0) + start / SUB_BLOCK;
    const int64_t end = seen.end < start + ATTENTION_CHUNK ? seen.end : start + ATTENTION_CHUNK;
    int64_t count = 0;
    for (int64_t sub = begin; sub * SUB_BLOCK < end; ++sub) {
      const int64_t block = seen.blocks[sub / per_block];
      at[count++] = static_cast<const char*>(task.cache) +
                    ((block * task.kv_heads + seen.kv_head) * per_block + sub % per_block) * sub_bytes;
    }
    return count;
  }
};

template <typename Engine, bool quantised>
void attend(const AttentionTask& task, void* memory) {
  using Cell = typename Engine::Cell;
  const int64_t size = task.head_size, rows = task.count;
  Scratch<Engine> scratch(memory, size);
  for (int64_t row = 0; row < rows; ++row) {
    std::memcpy(scratch.query + row * size, task.rows[row].query, size * sizeof(Cell));
  }
  if (!task.is_partial) {
    std::memset(scratch.total, 0, rows * size * sizeof(float));
    for (int64_t row = 0; row < MOST_ROWS; ++row) {
      scratch.greatest[row] = NO_SCORE;
      scratch.sums[row] = 0;
    }
  }
  const int64_t cell_bytes = quantised ? 1 : (int64_t)sizeof(Cell);
  const int64_t keys_bytes = SUB_BLOCK * size * cell_bytes, head_bytes = quantised ? SUB_BLOCK * 8 : 0;
  const int64_t sub_bytes = head_bytes + 2 * keys_bytes;
  const Places cache{task, sub_bytes};
  Engine engine(rows);
  Chunk<Cell> chunk{};
  chunk.key_scales = quantised ? scratch.scales : nullptr;
  chunk.value_scales = quantised ? scratch.scales + ATTENTION_CHUNK : nullptr;
  const char* places[2][CHUNK_SUB_BLOCKS];
  int64_t used = cache.list(task.seen, task.seen.first_chunk * ATTENTION_CHUNK, places[0]);
  // What this member's next task begins with is asked for beside the end of this one.
  const char* later[CHUNK_SUB_BLOCKS];
  const int64_t later_count =
      task.next == nullptr ? 0 : cache.list(*task.next, task.next->first_chunk * ATTENTION_CHUNK, later);
  int64_t asked_for = 0;
  const Ahead first{places[0], used, 0, quantised ? sub_bytes : keys_bytes};
  for (int64_t sub = 0; sub < used; ++sub) {
    first.touch(sub);
  }
  for (int64_t index = task.seen.first_chunk; index < task.seen.last_chunk; ++index) {
    const int64_t start = index * ATTENTION_CHUNK;
    const char** at = places[(index - task.seen.first_chunk) % 2];
    const char** following = places[(index - task.seen.first_chunk + 1) % 2];
    const int64_t next =
        index + 1 < task.seen.last_chunk ? cache.list(task.seen, start + ATTENTION_CHUNK, following) : 0;
    int64_t listed = next;
    while (index + 2 >= task.seen.last_chunk && listed < CHUNK_SUB_BLOCKS && asked_for < later_count) {
      following[listed++] = later[asked_for++];
    }
    const int64_t seen_begin = task.seen.begin;
    const int64_t from = start + (seen_begin > start ? (seen_begin - start) / SUB_BLOCK / 2 * 2 * SUB_BLOCK : 0);
    chunk.count = (used + 1) / 2 * 2;
    const int64_t width = chunk.count * SUB_BLOCK;
    for (int64_t sub = 0; sub < chunk.count; ++sub) {
      const Cell* cells = scratch.zeros;
      if (sub < used && quantised) {
        const float* scales = reinterpret_cast<const float*>(at[sub]);
        for (int64_t half = 0; half < 2; ++half) {
          std::memcpy(scratch.scales + half * ATTENTION_CHUNK + sub * SUB_BLOCK, scales + half * SUB_BLOCK,
                      SUB_BLOCK * 4);
        }
        Cell* to = scratch.widened + sub * SUB_BLOCK * 2 * size;
        const int8_t* numbers = reinterpret_cast<const int8_t*>(at[sub] + head_bytes);
        Engine::widen(numbers, (Engine::TAKES_INT8 ? 1 : 2) * SUB_BLOCK * size, to);
        chunk.int8_values[sub] = numbers + SUB_BLOCK * size;
        cells = to;
      } else if (sub < used) {
        cells = reinterpret_cast<const Cell*>(at[sub]);
      } else if (quantised) {
        chunk.int8_values[sub] = reinterpret_cast<const int8_t*>(scratch.zeros);
        std::memset(scratch.scales + sub * SUB_BLOCK, 0, SUB_BLOCK * 4);
        std::memset(scratch.scales + ATTENTION_CHUNK + sub * SUB_BLOCK, 0, SUB_BLOCK * 4);
      }
      chunk.keys[sub] = cells;
      chunk.values[sub] = cells + SUB_BLOCK * size;
    }
    for (int64_t group = 0; group < rows; group += ROWS_TOGETHER) {
      const int64_t together = rows - group < ROWS_TOGETHER ? rows - group : ROWS_TOGETHER;
      const int64_t half = sub_bytes / 2;
      engine.scores(scratch.query + group * size, together, size, chunk, scratch.scores,
                    group > 0   ? Ahead{}
                    : quantised ? Ahead{following, listed, 0, half}
                                : Ahead{at, used, keys_bytes, keys_bytes});
      // All rows step by step: what the next step of one waits for, the others fill with theirs.
      const float scale = task.soft_cap > 0 ? 1.0f : task.scale;
      SeenLanes seen[ROWS_TOGETHER];
      float greatest[ROWS_TOGETHER] = {}, sums[ROWS_TOGETHER] = {};
      for (int64_t row = 0; row < together; ++row) {
        const int64_t position = task.rows[group + row].position;
        const int64_t oldest = task.window > 0 && position + 1 > task.window ? position + 1 - task.window : 0;
        const int64_t last = position + 1 - from < width ? position + 1 - from : width;
        float* scores = scratch.scores + row * SCORE_STRIDE;
        seen[row] = SeenLanes(oldest > from ? oldest - from : 0, last);
        if (quantised || task.soft_cap > 0) {
          adjust<quantised>(scores, seen[row].begin, seen[row].end, chunk.key_scales, task.scale, task.soft_cap);
        }
        greatest[row] = seen[row].nothing() ? NO_SCORE : greatest_of(scores, seen[row]) * scale;
      }
      for (int64_t row = 0; row < together; ++row) {
        sums[row] = soften<Engine, quantised>(scratch.scores + row * SCORE_STRIDE,
                                              scratch.weights + row * weight_stride<typename Engine::Weight>, width,
                                              seen[row], chunk, scale, greatest[row]);
      }
      if (group == 0) {
        engine.take(chunk, size, scratch.values);
      }
      engine.values(scratch.weights, together, size, chunk, scratch.partial,
                    group > 0 ? Ahead{} : Ahead{following, listed, quantised ? half : 0, half});
      const Ahead rest{following, listed, 0, quantised ? sub_bytes : keys_bytes};
      for (int64_t sub = chunk.count; group == 0 && sub < listed; ++sub) {
        rest.touch(sub);
      }
      if (task.is_partial) {
        for (int64_t row = 0; row < together; ++row) {
          float* to = static_cast<float*>(task.rows[group + row].output) +
                      (index - task.seen.first_chunk) * partial_stride(size);
          std::memcpy(to, scratch.partial + row * size, size * sizeof(float));
          to[size] = greatest[row];
          to[size + 1] = sums[row];
        }
        continue;
      }
      float before[ROWS_TOGETHER], now[ROWS_TOGETHER];
      for (int64_t row = 0; row < together; row += LANES) {
        weigh(scratch.greatest + group + row, scratch.sums + group + row, greatest + row, sums + row, before + row,
              now + row);
      }
      for (int64_t row = 0; row < together; ++row) {
        merge(scratch.total + (group + row) * size, scratch.partial + row * size, size, before[row], now[row]);
      }
    }
    used = next;
  }
  for (int64_t row = 0; row < rows && !task.is_partial; ++row) {
    finish_row(scratch.total + row * size, scratch.sums[row], size, task.rows[row].output, task.is_output_bfloat16);
  }
}

template <typename Engine>
const AttentionKernels& kernels_of(bool is_int8) {
  static const AttentionKernels plain{attend<Engine, false>, fold}, quantised{attend<Engine, true>, fold};
  return is_int8 ? quantised : plain;
}

}  // namespace
}  // namespace trivet
