#include "decoder.h"

#include <algorithm>
#include <map>

#include "linear.h"
#include "paged_attention.h"
#include "rows.h"
#include "vector.h"

namespace trivet {

namespace {

// Rows that go through the MLP together: what lies between its products then stays in the caches.
constexpr int64_t MLP_ROWS = 256;
// Of the gate in a panel, beside as many of up.
constexpr int64_t GATE_COLUMNS = panel_columns / 2;

struct Layer {
  PackedWeight qkv, output, gate_and_up, down;
  std::vector<float> attention_norm, mlp_norm;
  std::vector<float> qkv_bias, output_bias, gate_and_up_bias, down_bias;  // empty: none
  int64_t window = 0;                                                     // tokens; 0: none
};

}  // namespace

struct Decoder::State {
  DecoderShape shape;
  Team team;
  const RowKernels& kernels;
  const PrepareColumns prepare_columns;
  std::vector<Layer> layers;
  std::vector<float> final_norm;
  PackedWeight head;
  AlignedBuffer embedding;  // empty while the head serves as one

  AlignedBuffer hidden, qkv, query, attended, inner;
  Input to_qkv, to_output, to_mlp, to_down, to_head;
  std::vector<Desk> desks;                  // one per member
  std::vector<AlignedBuffer> merged;        // a row of attention, one per member
  std::map<int64_t, PagedAttention> paged;  // by window
  std::vector<int64_t> lengths;             // of the step's sequences
  const DecoderStep* step = nullptr;

  State(const DecoderShape& given, int threads)
      : shape(given),
        team(threads),
        kernels(row_kernels()),
        prepare_columns(columns_preparer(given.format)),
        layers(given.layers),
        final_norm(given.hidden),
        head(given.head_format, given.vocab, given.hidden) {
    const int64_t rows = (shape.most_tokens + row_block - 1) / row_block * row_block;
    const int64_t query_size = shape.heads * shape.head_size, kv_size = shape.kv_heads * shape.head_size;
    for (Layer& layer : layers) {
      layer.qkv = PackedWeight(shape.format, query_size + 2 * kv_size, shape.hidden);
      layer.output = PackedWeight(shape.format, shape.hidden, query_size);
      layer.gate_and_up = PackedWeight(shape.format, 2 * shape.inner, shape.hidden);
      layer.gate_and_up.halves_in_turn = !is_block_format(shape.format);
      layer.down = PackedWeight(shape.format, shape.hidden, shape.inner);
      layer.attention_norm.resize(shape.hidden);
      layer.mlp_norm.resize(shape.hidden);
    }
    hidden = AlignedBuffer(rows * shape.hidden * 4);
    qkv = AlignedBuffer(std::min(rows, RACED_ROWS) * (query_size + 2 * kv_size) * 4);
    query = AlignedBuffer(rows * query_size * 4);
    attended = AlignedBuffer(rows * query_size * 4);
    const int64_t mlp_rows = std::min(rows, MLP_ROWS);
    inner = AlignedBuffer(mlp_rows * shape.inner * 4);
    to_qkv = Input(shape.format, rows, shape.hidden, threads);
    to_output = Input(shape.format, rows, query_size, threads);
    to_mlp = Input(shape.format, mlp_rows, shape.hidden, threads);
    to_down = Input(shape.format, mlp_rows, shape.inner, threads);
    to_head = Input(shape.head_format, rows, shape.hidden, threads);
    for (int member = 0; member < threads; ++member) {
      merged.emplace_back(query_size * 4);
      desks.push_back({AlignedBuffer(shape.hidden * 4), AlignedBuffer(result_bytes())});
    }
    use_window(0, 0);
  }

  float* row(AlignedBuffer& buffer, int64_t index, int64_t width) { return buffer.as<float>() + index * width; }

  void use_window(int64_t layer, int64_t window) {
    layers[layer].window = window;
    const float scale = 1.0f / __builtin_sqrtf((float)shape.head_size);
    paged.try_emplace(window, AttentionShape{shape.cache, shape.heads, shape.kv_heads, shape.head_size, scale, 0.0f},
                      team.size());
  }

  void plan() {
    lengths.clear();
    for (int64_t sequence = 0; sequence < step->sequences; ++sequence) {
      const int64_t end = step->query_starts[sequence + 1];
      lengths.push_back(end > step->query_starts[sequence] ? step->positions[end - 1] + 1 : 0);
    }
    const PagedStep one{step->sequences,   step->query_starts, lengths.data(),
                        step->block_table, step->table_stride, step->block_size};
    for (auto& [window, attention] : paged) {
      attention.plan(one, window, step->shares_prefixes != 0);
    }
  }

  // Of the largest item of any product.
  int64_t result_bytes() {
    const int members = team.size();
    int64_t most = MLP_ROWS * 2 * panel_columns;
    for (const PackedWeight* weight : {&layers[0].qkv, &layers[0].output, &layers[0].down, &head}) {
      const int64_t panels = Shares(weight->panels, least_panels(*weight, RACED_ROWS), members).most();
      most = std::max(most, RACED_ROWS * panels * panel_columns);
    }
    const PackedWeight& gate = layers[0].gate_and_up;
    const int64_t apart = gate.halves_in_turn ? 1 : 2;
    const Shares shares(gate.panels / apart, least_panels(gate, RACED_ROWS), members);
    return 4 * std::max(most, RACED_ROWS * apart * shares.most() * panel_columns);
  }

  void embed(Member& member) {
    member.each(step->tokens, [&](int64_t token) {
      float* to = row(hidden, token, shape.hidden);
      const int64_t id = step->token_ids[token];
      if (embedding.bytes() == 0) {
        unpack_row(head, id, to);
      } else if (multiplies_float32(shape.cache)) {
        std::memcpy(to, embedding.as<float>() + id * shape.hidden, shape.hidden * sizeof(float));
      } else {
        const Bfloat16* from = embedding.as<Bfloat16>() + id * shape.hidden;
        std::transform(from, from + shape.hidden, to, [](Bfloat16 value) { return to_float(value); });
      }
    });
  }

  // Norm of a row of the residual stream, as the input of a product.
  void norm_row(Member& member, const std::vector<float>& weight, int64_t from, Activations& into, int64_t to) {
    float* out = desks[member.index()].row.as<float>();
    kernels.rms_norm(row(hidden, from, shape.hidden), weight.data(), shape.epsilon, shape.hidden, out);
    prepare(into, out - to * shape.hidden, shape.hidden, to, to + 1);
  }

  // One head of a token's query, key or value goes where attention reads it; queries and keys are turned before.
  void hand_on(float* from, int64_t token, int64_t head, void* cache) {
    const int64_t size = shape.head_size, key = head - shape.heads, value = key - shape.kv_heads;
    if (value < 0) {
      const int64_t angles = step->positions[token] * size / 2;
      kernels.rotate(from, step->cosines + angles, step->sines + angles, size);
    }
    if (key < 0) {
      const int64_t place = (token * shape.heads + head) * size * query_cell_bytes(shape.cache);
      kernels.store_query(shape.cache, from, size, query.as<char>() + place);
    } else if (step->slots[token] >= 0) {
      const CacheShape cells{shape.cache, step->block_size, shape.kv_heads, size};
      const CachePlace place = cells.place(cache, step->slots[token], value < 0 ? key : value);
      (value < 0 ? kernels.write_key : kernels.write_value)(place, from, size);
    }
  }

  // An item is a head: what is made of some rows goes on while it is in the caches.
  void project_many(Member& member, Layer& layer, void* cache) {
    const int64_t size = shape.head_size, panels = size / panel_columns;
    const int64_t together = MLP_ROWS * 2 * panel_columns / size / row_block * row_block;
    float* results = desks[member.index()].results.as<float>();
    member.each(shape.heads + 2 * shape.kv_heads, [&](int64_t head) {
      const float* bias = layer.qkv_bias.empty() ? nullptr : layer.qkv_bias.data() + head * size;
      for (int64_t begin = 0; begin < step->tokens; begin += together) {
        const int64_t end = std::min(begin + together, step->tokens);
        float* origin = results - begin * size - head * size;
        matmul(layer.qkv, to_qkv.shared, {begin, end, head * panels, (head + 1) * panels}, origin, size, Output::store);
        for (int64_t token = begin; token < end; ++token) {
          float* from = results + (token - begin) * size;
          for (int64_t at = 0; bias != nullptr && at < size; ++at) {
            from[at] += bias[at];
          }
          hand_on(from, token, head, cache);
        }
      }
    });
  }

  void attention(Member& member, Layer& layer, void* cache) {
    const int64_t query_size = shape.heads * shape.head_size;
    auto normed = [&](Activations& into, int64_t token) { norm_row(member, layer.attention_norm, token, into, token); };
    prepare_shared(member, to_qkv, step->tokens, normed);
    if (step->tokens > RACED_ROWS) {
      project_many(member, layer, cache);
    } else {
      const int64_t width = query_size + 2 * shape.kv_heads * shape.head_size;
      multiply(member, layer.qkv, layer.qkv_bias, to_qkv, step->tokens, qkv.as<float>(), width, Output::store,
               desks[member.index()], normed);
      member.each(step->tokens, [&](int64_t token) {
        for (int64_t head = 0; head < shape.heads + 2 * shape.kv_heads; ++head) {
          hand_on(row(qkv, token, width) + head * shape.head_size, token, head, cache);
        }
      });
    }
    PagedAttention& attention = paged.at(layer.window);
    const AttentionStates states{query.as<void>(), query_size, attended.as<void>(), query_size, false};
    attention.run(member, cache, states);
    // Into this member's own memory: another may be at the same row.
    float* room = merged[member.index()].as<float>();
    auto result = [&](Activations& into, int64_t token) {
      const float* from = attention.merge(token, room) ? room : row(attended, token, query_size);
      prepare(into, from - token * query_size, query_size, token, token + 1);
    };
    prepare_shared(member, to_output, step->tokens, result);
    multiply(member, layer.output, layer.output_bias, to_output, step->tokens, hidden.as<float>(), shape.hidden,
             Output::add, desks[member.index()], result);
  }

  void mlp(Member& member, Layer& layer) {
    Desk& desk = desks[member.index()];
    for (int64_t begin = 0; begin < step->tokens; begin += MLP_ROWS) {
      const int64_t rows = std::min(MLP_ROWS, step->tokens - begin);
      auto normed = [&](Activations& into, int64_t index) {
        norm_row(member, layer.mlp_norm, begin + index, into, index);
      };
      prepare_shared(member, to_mlp, rows, normed);
      gate(member, layer, rows, normed);
      auto gated = [&](Activations& into, int64_t index) {
        prepare(into, inner.as<float>(), shape.inner, index, index + 1);
      };
      if (!by_columns(rows)) prepare_shared(member, to_down, rows, gated);
      multiply(member, layer.down, layer.down_bias, to_down, rows, row(hidden, begin, shape.hidden), shape.hidden,
               Output::add, desk, gated);
    }
  }

  // Whether the down projection's input is made column by column, as soon as they are there.
  bool by_columns(int64_t rows) const { return rows > RACED_ROWS && prepare_columns != nullptr; }

  // inner = silu(gate) * up.
  template <typename PrepareRow>
  void gate(Member& member, Layer& layer, int64_t rows, PrepareRow prepare_row) {
    if (!layer.gate_and_up.halves_in_turn) {
      gate_apart(member, layer, rows, prepare_row);
    } else if (rows <= RACED_ROWS) {
      gate_few(member, layer, rows, prepare_row);
    } else {
      gate_many(member, layer, rows);
    }
  }

  // A panel has sixteen columns of the gate, and the same of up beside them: `panels` of them in each row.
  void gate_sums(const Layer& layer, float* sums, int64_t rows, int64_t first, int64_t panels) {
    const std::vector<float>& bias = layer.gate_and_up_bias;
    for (int64_t index = 0; !bias.empty() && index < rows * panels; ++index) {
      const int64_t begin = (first + index % panels) * GATE_COLUMNS;
      for (int64_t column = 0; column < GATE_COLUMNS; ++column) {
        sums[index * panel_columns + column] += bias[begin + column];
        sums[index * panel_columns + GATE_COLUMNS + column] += bias[shape.inner + begin + column];
      }
    }
    kernels.silu_and_multiply_rows(sums, rows * panels, GATE_COLUMNS);
  }

  template <typename PrepareRow>
  void gate_few(Member& member, Layer& layer, int64_t rows, PrepareRow prepare_row) {
    const PackedWeight& weight = layer.gate_and_up;
    const Shares shares(weight.panels, least_panels(weight, rows), member.size());
    Prepared<PrepareRow> prepared(member, to_mlp, rows, prepare_row);
    float* results = desks[member.index()].results.as<float>();
    member.race(
        shares.count,
        [&](int64_t item) {
          const int64_t first = shares.first(item), panels = shares.first(item + 1) - first;
          matmul(weight, prepared.get(), {0, rows, first, first + panels}, results - first * panel_columns,
                 panels * panel_columns, Output::store);
          gate_sums(layer, results, rows, first, panels);
        },
        [&](int64_t item) {
          const int64_t first = shares.first(item), panels = shares.first(item + 1) - first;
          for (int64_t index = 0; index < rows * panels; ++index) {
            std::memcpy(row(inner, index / panels, shape.inner) + (first + index % panels) * GATE_COLUMNS,
                        results + index * panel_columns, GATE_COLUMNS * 4);
          }
        });
  }

  // The sums of some rows are used up while they are in the first cache.
  void gate_many(Member& member, Layer& layer, int64_t rows) {
    const PackedWeight& weight = layer.gate_and_up;
    auto take = [&](float* sums, int64_t begin, int64_t count, int64_t panel) {
      gate_sums(layer, sums, count, panel, 1);
      const int64_t column = panel * GATE_COLUMNS;
      if (by_columns(rows)) {
        prepare_columns(to_down.shared, sums - begin * panel_columns, panel_columns,
                        {begin, begin + count, column, column + GATE_COLUMNS});
        return;
      }
      for (int64_t index = 0; index < count; ++index) {
        std::memcpy(row(inner, begin + index, shape.inner) + column, sums + index * panel_columns, GATE_COLUMNS * 4);
      }
    };
    const SumsTaker taker = taker_of(take);
    const Shares shares(weight.panels, least_panels(weight, rows), member.size());
    member.each(shares.count, [&](int64_t item) {
      matmul(weight, to_mlp.shared, {0, rows, shares.first(item), shares.first(item + 1)}, taker);
    });
  }

  // Of weights in blocks, of which gate and up may have different ones: an item makes the same columns of both, and
  // hands them on while they are in its caches.
  template <typename PrepareRow>
  void gate_apart(Member& member, Layer& layer, int64_t rows, PrepareRow prepare_row) {
    const PackedWeight& weight = layer.gate_and_up;
    const std::vector<float>& bias = layer.gate_and_up_bias;
    const int64_t half = shape.inner / panel_columns;
    const Shares shares(half, least_panels(weight, rows), member.size());
    Prepared<PrepareRow> prepared(member, to_mlp, rows, prepare_row);
    float* results = desks[member.index()].results.as<float>();
    auto compute = [&](int64_t first, int64_t last) {
      const int64_t width = (last - first) * panel_columns, begin = first * panel_columns;
      float* up = results + width;
      matmul(weight, prepared.get(), {0, rows, first, last}, results - begin, 2 * width, Output::store);
      matmul(weight, prepared.get(), {0, rows, half + first, half + last}, up - shape.inner - begin, 2 * width,
             Output::store);
      for (int64_t index = 0; !bias.empty() && index < rows; ++index) {
        float* gate = results + index * 2 * width;
        for (int64_t column = 0; column < width; ++column) {
          gate[column] += bias[begin + column];
          gate[width + column] += bias[shape.inner + begin + column];
        }
      }
      kernels.silu_and_multiply_rows(results, rows, width);
    };
    auto publish = [&](int64_t first, int64_t last) {
      const int64_t width = (last - first) * panel_columns;
      for (int64_t index = 0; index < rows; ++index) {
        std::memcpy(row(inner, index, shape.inner) + first * panel_columns, results + index * 2 * width, width * 4);
      }
    };
    if (rows <= RACED_ROWS) {
      member.race(
          shares.count, [&](int64_t item) { compute(shares.first(item), shares.first(item + 1)); },
          [&](int64_t item) { publish(shares.first(item), shares.first(item + 1)); });
      return;
    }
    member.each(shares.count, [&](int64_t item) {
      for (int64_t panel = shares.first(item); panel < shares.first(item + 1); ++panel) {
        compute(panel, panel + 1);
        if (by_columns(rows)) {
          const int64_t begin = panel * panel_columns;
          prepare_columns(to_down.shared, results, 2 * panel_columns, {0, rows, begin, begin + panel_columns});
        } else {
          publish(panel, panel + 1);
        }
      }
    });
  }

  void finish(Member& member) {
    if (step->normed != nullptr) {
      member.each(step->tokens, [&](int64_t token) {
        kernels.rms_norm(row(hidden, token, shape.hidden), final_norm.data(), shape.epsilon, shape.hidden,
                         step->normed + token * shape.hidden);
      });
    }
    score(member, step->sampled, step->logits, [&](Activations& into, int64_t index) {
      norm_row(member, final_norm, step->sampled_rows[index], into, index);
    });
  }

  template <typename PrepareRow>
  void score(Member& member, int64_t rows, float* logits, PrepareRow prepare_row) {
    if (rows == 0) {
      return;
    }
    prepare_shared(member, to_head, rows, prepare_row);
    multiply(member, head, {}, to_head, rows, logits, shape.vocab, Output::store, desks[member.index()], prepare_row);
  }

  // Asked for apart from a step: of states that were handed out.
  const float* given = nullptr;
  int64_t given_rows = 0;
  float* wanted = nullptr;

  void score_given(Member& member) {
    score(member, given_rows, wanted,
          [&](Activations& into, int64_t index) { prepare(into, given, shape.hidden, index, index + 1); });
  }

  void live(Member& member) {
    embed(member);
    for (int64_t index = 0; index < shape.layers; ++index) {
      if (step->caches != nullptr) {
        attention(member, layers[index], step->caches[index]);
      }
      mlp(member, layers[index]);
    }
    finish(member);
  }
};

Decoder::Decoder(const DecoderShape& shape, int threads) : state_(new State(shape, threads)) {}
Decoder::~Decoder() = default;

const DecoderShape& Decoder::shape() const { return state_->shape; }

PackedWeight& Decoder::weight(int64_t index, LayerPart part) {
  Layer& layer = state_->layers[index];
  switch (part) {
    case LayerPart::qkv:
      return layer.qkv;
    case LayerPart::output:
      return layer.output;
    case LayerPart::gate_and_up:
      return layer.gate_and_up;
    default:
      return layer.down;
  }
}

float* Decoder::bias(int64_t index, LayerPart part) {
  Layer& layer = state_->layers[index];
  std::vector<float>& bias = part == LayerPart::qkv           ? layer.qkv_bias
                             : part == LayerPart::output      ? layer.output_bias
                             : part == LayerPart::gate_and_up ? layer.gate_and_up_bias
                                                              : layer.down_bias;
  bias.resize(weight(index, part).n);
  return bias.data();
}

float* Decoder::norm(int64_t index, LayerPart part) {
  Layer& layer = state_->layers[index];
  return part == LayerPart::attention_norm ? layer.attention_norm.data() : layer.mlp_norm.data();
}

void Decoder::use_window(int64_t layer, int64_t window) { state_->use_window(layer, window); }

int64_t Decoder::chunks_saved() const {
  int64_t saved = 0;
  for (const auto& [window, attention] : state_->paged) {
    saved += attention.chunks_saved();
  }
  return saved;
}

float* Decoder::final_norm() { return state_->final_norm.data(); }
PackedWeight& Decoder::head() { return state_->head; }

void* Decoder::embedding() {
  const DecoderShape& shape = state_->shape;
  if (state_->embedding.bytes() == 0) {
    state_->embedding = AlignedBuffer(shape.vocab * shape.hidden * query_cell_bytes(shape.cache));
  }
  return state_->embedding.as<void>();
}

void Decoder::run(const DecoderStep& step) {
  state_->step = &step;
  if (step.caches != nullptr) {
    state_->plan();
  }
  state_->team.run([](void* state, Member& member) { static_cast<State*>(state)->live(member); }, state_.get());
}

void Decoder::logits(const float* normed, int64_t rows, float* logits) {
  state_->given = normed;
  state_->given_rows = rows;
  state_->wanted = logits;
  state_->team.run([](void* state, Member& member) { static_cast<State*>(state)->score_given(member); }, state_.get());
}

}  // namespace trivet
