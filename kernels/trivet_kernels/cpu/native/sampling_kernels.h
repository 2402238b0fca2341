// Sampling of one row, in compiler vectors. Included by one file per instruction set, which names its table.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "doubles.h"
#include "sampling.h"
#include "vector.h"

namespace trivet {
namespace {

constexpr float NEVER = -std::numeric_limits<float>::infinity();
constexpr int64_t CHUNK = 64;

// What a request may bring, packed: the numbers, then the arrays in this order.
struct Constraints {
  int32_t allowed, biases, words, word_ids, ends;  // allowed: -1 for all
  const int32_t *allowed_ids, *bias_ids, *bias_values, *word_sizes, *words_of, *end_ids;

  explicit Constraints(const int32_t* packed)
      : allowed(packed[0]), biases(packed[1]), words(packed[2]), word_ids(packed[3]), ends(packed[4]) {
    allowed_ids = packed + 5;
    bias_ids = allowed_ids + std::max(allowed, 0);
    bias_values = bias_ids + biases;  // floats
    word_sizes = bias_values + biases;
    words_of = word_sizes + words;
    end_ids = words_of + word_ids;
  }
};

// The greatest value, NaN where there is one.
float greatest(const float* row, int64_t size) {
  Floats best = splat(NEVER);
  Ints broken = Ints{};
  int64_t at = 0;
  for (; at + LANES <= size; at += LANES) {
    const Floats values = load(row + at);
    broken |= values != values;
    best = max(values, best);
  }
  float result = max_of(best);
  for (int lane = 0; lane < LANES; ++lane) {
    if (broken[lane]) return std::numeric_limits<float>::quiet_NaN();
  }
  for (; at < size; ++at) {
    if (row[at] != row[at]) return row[at];
    result = std::max(result, row[at]);
  }
  return result;
}

// Where a value is first.
int64_t first_of(const float* row, int64_t size, float value) {
  int64_t at = 0;
  for (; at + CHUNK <= size; at += CHUNK) {
    Ints found = Ints{};
    for (int64_t part = 0; part < CHUNK; part += LANES) found |= load(row + at + part) == splat(value);
    if (any_of((Longs)found)) break;
  }
  while (at < size && row[at] != value) ++at;
  return at;
}

uint64_t key_of(float score, int64_t id) {
  uint32_t bits;
  score += 0.0f;  // both zeros are one
  std::memcpy(&bits, &score, sizeof bits);
  bits ^= bits >> 31 ? 0xffffffffu : 0x80000000u;
  return (uint64_t)bits << 32 | (0xffffffffu - (uint32_t)id);  // of equal scores the lowest id goes first
}

int64_t id_of(uint64_t key) { return 0xffffffffu - (uint32_t)key; }

// Keys of all scores at or above a bound, in no order; returns how many.
int64_t collect(const float* row, int64_t size, float bound, uint64_t* keys) {
  int64_t count = 0, at = 0;
  for (; at + CHUNK <= size; at += CHUNK) {
    Ints found = Ints{};
    for (int64_t part = 0; part < CHUNK; part += LANES) found |= load(row + at + part) >= splat(bound);
    if (!any_of((Longs)found)) continue;
    for (int64_t id = at; id < at + CHUNK; ++id) {
      keys[count] = key_of(row[id], id);
      count += row[id] >= bound;
    }
  }
  for (; at < size; ++at) {
    if (row[at] >= bound) keys[count++] = key_of(row[at], at);
  }
  return count;
}

// A superset of the `most` best: of so many chunks each holds one at or above the least of their maxima.
int64_t collect_best(const float* row, int64_t size, int64_t most, float* maxima, uint64_t* keys) {
  const int64_t chunks = size / CHUNK;
  float bound = NEVER;
  if (most > 0 && most * 2 < chunks) {
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      const float* from = row + chunk * CHUNK;
      maxima[chunk] = max_of(max(max(load(from), load(from + 16)), max(load(from + 32), load(from + 48))));
    }
    std::nth_element(maxima, maxima + most - 1, maxima + chunks, std::greater<float>());
    bound = maxima[most - 1];
  }
  const int64_t count = collect(row, size, bound, keys);
  if (count >= most) return count;
  for (int64_t id = 0; id < size; ++id) keys[id] = key_of(row[id], id);  // a row with NaN: any ids will do
  return size;
}

void penalise(const SamplingBatch& batch, int64_t row, int64_t slot, float* logits, int32_t* marks) {
  const float repetition = batch.repetition[slot], frequency = batch.frequency[slot], presence = batch.presence[slot];
  const int32_t* ids = batch.token_ids + slot * batch.token_stride;
  const int64_t prompt = batch.prompt_lengths[row], length = batch.lengths[row];
  constexpr int32_t IN_PROMPT = 1 << 30;
  const int64_t first = repetition != 1.0f ? 0 : prompt;  // presence and frequency look at the output alone
  for (int64_t at = first; at < prompt; ++at) marks[ids[at]] = IN_PROMPT;
  for (int64_t at = prompt; at < length; ++at) ++marks[ids[at]];
  for (int64_t at = first; at < length; ++at) {
    const int32_t id = ids[at], mark = marks[id], count = mark & ~IN_PROMPT;
    if (mark == 0) continue;
    marks[id] = 0;
    float value = logits[id];
    if (repetition != 1.0f) value = value > 0 ? value / repetition : value * repetition;
    if (count > 0) value = value - frequency * (float)count - presence;
    logits[id] = value;
  }
}

void constrain(const SamplingBatch& batch, int64_t row, const Constraints& given, float* logits, float* memory) {
  const int64_t slot = batch.slots[row], outputs = batch.lengths[row] - batch.prompt_lengths[row];
  if (given.allowed >= 0) {
    for (int32_t index = 0; index < given.allowed; ++index) memory[index] = logits[given.allowed_ids[index]];
    std::fill_n(logits, batch.vocab, NEVER);
    for (int32_t index = 0; index < given.allowed; ++index) logits[given.allowed_ids[index]] = memory[index];
  }
  const int32_t* word = given.words_of;
  const int32_t* end = batch.token_ids + slot * batch.token_stride + batch.lengths[row];
  for (int32_t index = 0; index < given.words; ++index) {
    const int64_t before = given.word_sizes[index] - 1;  // a word that began in the prompt is not the model's
    if (before <= outputs && std::equal(word, word + before, end - before)) logits[word[before]] = NEVER;
    word += given.word_sizes[index];
  }
  if (outputs < batch.min_tokens[slot]) {
    for (int32_t index = 0; index < given.ends; ++index) logits[given.end_ids[index]] = NEVER;
  }
  for (int32_t index = 0; index < given.biases; ++index) {
    float bias;
    std::memcpy(&bias, given.bias_values + index, sizeof bias);
    logits[given.bias_ids[index]] += bias;
  }
}

// By the greatest value: what a row without a token is told as.
RowFlag flag_of(float best, bool is_raw) {
  if (std::isfinite(best)) return ROW_FINE;
  return best == NEVER && !is_raw ? ROW_ALL_MASKED : ROW_NON_FINITE;
}

// Temperature and min-p; the best score is 0 from here on, so that no temperature can overflow.
void scale(const SamplingBatch& batch, int64_t slot, float best, float* logits) {
  const float temperature = batch.temperature[slot], min_p = batch.min_p[slot];
  const float least = min_p > 0 ? (float)log_of(Doubles{} + (double)min_p)[0] : NEVER;
  int64_t at = 0;
  for (; at + LANES <= batch.vocab; at += LANES) {
    const Floats score = (load(logits + at) - best) / temperature;
    store(logits + at, select(score < splat(least), splat(NEVER), score));
  }
  for (; at < batch.vocab; ++at) {
    const float score = (logits[at] - best) / temperature;
    logits[at] = score < least ? NEVER : score;
  }
}

// e^(score - best) of each, and their sum.
double masses_of(const float* row, int64_t size, float best, float* masses) {
  Doubles sum = Doubles{};
  const double top = best;
  int64_t at = 0;
  for (; at + WIDTH <= size; at += WIDTH) {
    const Doubles mass = exp_of(load_doubles(row + at) - top);
    sum += mass;
    if (masses != nullptr) {
      typedef float Half __attribute__((vector_size(32)));
      const Half half = __builtin_convertvector(mass, Half);
      std::memcpy(masses + at, &half, sizeof half);
    }
  }
  double total = sum_of(sum);
  for (; at < size; ++at) {
    const double mass = exp_of(Doubles{} + ((double)row[at] - top))[0];
    total += mass;
    if (masses != nullptr) masses[at] = (float)mass;
  }
  return total;
}

// How much mass tokens have whose own is at least `bound`, and how many they are.
struct Above {
  double mass;
  int64_t count;
};

Above above(const float* masses, int64_t size, float bound) {
  Doubles sum = Doubles{}, other = Doubles{};
  Ints counts = Ints{};
  int64_t at = 0;
  for (; at + LANES <= size; at += LANES) {
    const Floats values = load(masses + at);
    const Ints is_above = values >= splat(bound);
    float kept[LANES];
    store(kept, select(is_above, values, Floats{}));
    sum += load_doubles(kept);
    other += load_doubles(kept + WIDTH);
    counts -= is_above;
  }
  Above result{sum_of(sum + other), 0};
  for (int lane = 0; lane < LANES; ++lane) result.count += counts[lane];
  for (; at < size; ++at) {
    if (masses[at] >= bound) result.mass += masses[at], ++result.count;
  }
  return result;
}

// The last key of the shortest prefix, in order, whose mass and what is `before` it reach the limit; of all of them if
// none does. Found by halves, without sorting.
uint64_t edge_among(const float* masses, uint64_t* keys, int64_t count, double before, double limit) {
  int64_t begin = 0, end = count;
  while (end - begin > 1) {
    const int64_t middle = begin + (end - begin) / 2;
    std::nth_element(keys + begin, keys + middle, keys + end, std::greater<uint64_t>());
    double mass = before;
    for (int64_t index = begin; index < middle; ++index) mass += masses[id_of(keys[index])];
    if (mass >= limit) {
      end = middle;
    } else {
      before = mass;
      begin = middle;
    }
  }
  return keys[begin];
}

// Few enough to be looked at one by one.
constexpr int64_t BAND = 256;

float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// Top-p of a whole row: a token stays when those before it do not reach top_p yet. Returns the key of the last one.
// Bisected over masses, whose bits are ordered as they are, down to a band of few tokens.
uint64_t nucleus_edge(const float* row, int64_t size, float best, int64_t best_id, double top_p,
                      const SamplingScratch& memory) {
  const float* masses = memory.masses;
  const double limit = top_p * masses_of(row, size, best, memory.masses);
  if (limit <= 1.0) return key_of(best, best_id);
  uint32_t low = 0, high = 0x3f800001, middle = 0x39800000;  // all; none; 2^-12, where most nuclei end
  Above over_high{0, 0};
  int64_t band = size;
  while (band > BAND && high - low > 1) {
    const Above over = above(masses, size, float_of(middle));
    if (over.mass >= limit) {
      low = middle;
      band = over.count - over_high.count;
    } else {
      high = middle;
      band -= over.count - over_high.count;
      over_high = over;
    }
    middle = low + (high - low) / 2;
  }
  const float from = float_of(low), to = float_of(high);
  int64_t count = 0;
  for (int64_t at = 0; at < size; at += CHUNK) {
    const int64_t end = std::min(at + CHUNK, size);
    if (end - at == CHUNK) {
      Ints found = Ints{};
      for (int64_t part = at; part < end; part += LANES) {
        const Floats values = load(masses + part);
        found |= (values >= splat(from)) & (values < splat(to));
      }
      if (!any_of((Longs)found)) continue;
    }
    for (int64_t id = at; id < end; ++id) {
      if (masses[id] >= from && masses[id] < to) memory.keys[count++] = key_of(row[id], id);
    }
  }
  return edge_among(masses, memory.keys, count, over_high.mass, limit);
}

// Top-k, then top-p: the key of the last token that stays.
uint64_t edge_of(const float* row, int64_t size, float best, int64_t best_id, int64_t top_k, double top_p,
                 const SamplingScratch& memory) {
  if (top_k <= 0 || top_k >= size) return nucleus_edge(row, size, best, best_id, top_p, memory);
  uint64_t* keys = memory.keys;
  const int64_t count = collect_best(row, size, top_k, memory.masses, keys);
  std::nth_element(keys, keys + top_k - 1, keys + count, std::greater<uint64_t>());
  if (top_p >= 1.0) return keys[top_k - 1];
  double total = 0;
  for (int64_t index = 0; index < top_k; ++index) {
    const int64_t id = id_of(keys[index]);
    memory.masses[id] = (float)exp_of(Doubles{} + ((double)row[id] - best))[0];
    total += memory.masses[id];
  }
  return edge_among(memory.masses, keys, top_k, 0, top_p * total);
}

struct Winner {
  double score = -std::numeric_limits<double>::infinity();
  int64_t id = std::numeric_limits<int64_t>::max();

  void offer(Doubles scores, Hashes ids, int lanes) {
    for (int lane = 0; lane < lanes; ++lane) {
      const int64_t other = (int64_t)ids[lane];
      if (scores[lane] > score || (scores[lane] == score && other < id)) score = scores[lane], id = other;
    }
  }
};

// Among the tokens from the edge up. Few can win once a good one is known, and only theirs is worth two logarithms.
int64_t choose_among(const float* row, int64_t size, uint64_t key, int64_t best_id, float edge, int64_t edge_id) {
  Winner winner;
  const Hashes known = Hashes{} + (uint64_t)best_id;
  winner.offer(gumbel(uniform(key, known)) + (double)row[best_id], known, 1);
  Hashes ids = {0, 1, 2, 3, 4, 5, 6, 7};
  int64_t at = 0;
  for (; at + WIDTH <= size; at += WIDTH, ids += WIDTH) {
    Doubles scores = load_doubles(row + at);
    const Longs stays = (scores > (double)edge) | ((scores == (double)edge) & ((Longs)ids <= edge_id));
    if (!any_of(stays)) continue;
    const Doubles chance = uniform(key, ids);
    scores = select(stays, scores, Doubles{} + NEVER);
    if (any_of(scores + noise_bound(chance) >= winner.score)) winner.offer(scores + gumbel(chance), ids, WIDTH);
  }
  Doubles scores = Doubles{} + NEVER;
  for (int64_t id = at; id < size; ++id) {
    if (row[id] > edge || (row[id] == edge && id <= edge_id)) scores[id - at] = row[id];
  }
  if (at < size) winner.offer(scores + gumbel(uniform(key, ids)), ids, (int)(size - at));
  return winner.id;
}

void choose(const SamplingBatch& batch, int64_t row, int64_t slot, float best, float* logits,
            const SamplingScratch& memory) {
  int64_t& token = batch.tokens[row];
  token = first_of(logits, batch.vocab, best);
  if (batch.temperature[slot] <= 0) return;
  const uint64_t key = row_key(batch.seeds[slot], batch.lengths[row]);
  const int64_t top_k = batch.top_k[slot];
  const float top_p = batch.top_p[slot];
  float edge = NEVER;
  int64_t edge_id = batch.vocab;
  if ((top_k > 0 && top_k < batch.vocab) || top_p < 1.0f) {
    edge_id = id_of(edge_of(logits, batch.vocab, best, token, top_k, top_p, memory));
    edge = logits[edge_id];
  }
  token = choose_among(logits, batch.vocab, key, token, edge, edge_id);
  if (!batch.keeps_filtered) return;
  for (int64_t id = 0; id < batch.vocab; ++id) {
    if (logits[id] < edge || (logits[id] == edge && id > edge_id)) logits[id] = NEVER;
  }
}

void sample_row(const SamplingBatch& batch, int64_t row, const SamplingScratch& memory) {
  const int64_t slot = batch.slots[row];
  float* logits = batch.logits + row * batch.vocab;
  uint8_t& flag = batch.flags[row];
  float best = greatest(logits, batch.vocab);
  if (batch.phases & PHASE_CONSTRAIN) {
    flag = flag_of(best, true);  // single -inf are a model's own masks
    if (batch.constraints[slot] != nullptr && flag == ROW_FINE) {
      constrain(batch, row, Constraints(batch.constraints[slot]), logits, memory.masses);
      best = greatest(logits, batch.vocab);
    }
  }
  if (flag == ROW_FINE) flag = flag_of(best, false);
  if (batch.phases & PHASE_SCALE && flag == ROW_FINE) {
    if (batch.repetition[slot] != 1.0f || batch.presence[slot] != 0.0f || batch.frequency[slot] != 0.0f) {
      penalise(batch, row, slot, logits, memory.marks);
      best = greatest(logits, batch.vocab);
      flag = flag_of(best, false);
    }
    batch.shifts[row] = 0;
    if (batch.temperature[slot] > 0 && flag == ROW_FINE) {
      batch.shifts[row] = best / batch.temperature[slot];
      scale(batch, slot, best, logits);
      best = 0;
    }
  }
  batch.tokens[row] = 0;
  if (batch.phases & PHASE_CHOOSE && flag == ROW_FINE) choose(batch, row, slot, best, logits, memory);
}

void pick_row(const LogprobRequest& request, int64_t row, const int32_t* wanted, int64_t at,
              const SamplingScratch& memory) {
  const float* scores = request.scores + row * request.vocab;
  const int64_t size = request.vocab, width = request.widths[row], chosen = request.chosen[row];
  int64_t above = 0, column = 0;
  const Floats bound = splat(scores[chosen]);
  Ints counts = Ints{};
  for (; column + LANES <= size; column += LANES) counts -= load(scores + column) > bound;
  for (int lane = 0; lane < LANES; ++lane) above += counts[lane];
  for (; column < size; ++column) above += scores[column] > scores[chosen];
  request.ranks[row] = (int32_t)above + 1;
  const float best = greatest(scores, size);
  const bool is_plain = request.is_plain[row] != 0;
  const double norm =
      is_plain || !std::isfinite(best) ? 0 : log_of(Doubles{} + masses_of(scores, size, best, nullptr))[0];
  const auto put = [&](int64_t entry, int64_t id) {
    const float score = scores[id];
    float value = is_plain ? score + request.shift[row] : (float)(((double)score - best) - norm);
    if (!std::isfinite(value) || (!is_plain && value < LOGPROB_FLOOR)) value = LOGPROB_FLOOR;
    request.token_ids[at + entry] = (int32_t)id;
    request.values[at + entry] = value;
  };
  put(0, chosen);
  if (request.is_wanted[row]) {
    for (int64_t index = 0; index < width; ++index) put(index + 1, wanted[index]);
    return;
  }
  const int64_t count = width > 0 ? collect_best(scores, size, width, memory.masses, memory.keys) : 0;
  if (count > width) {
    std::nth_element(memory.keys, memory.keys + width, memory.keys + count, std::greater<uint64_t>());
  }
  std::sort(memory.keys, memory.keys + width, std::greater<uint64_t>());
  for (int64_t index = 0; index < width; ++index) put(index + 1, id_of(memory.keys[index]));
}

constexpr SamplingKernels KERNELS{sample_row, pick_row};

}  // namespace
}  // namespace trivet
