#include "decoder.h"

#include <algorithm>

#include "rows.h"
#include "vector.h"

namespace trivet {

namespace {

// Rows that go through the MLP together: what lies between its products then stays in the caches.
constexpr int64_t MLP_ROWS = 256;
// Query rows of one attention task: several tiles high, small enough to share evenly.
constexpr int64_t TASK_ROWS = 64;

struct Layer {
  PackedWeight qkv, output, gate_and_up, down;
  std::vector<float> attention_norm, mlp_norm;
  std::vector<float> qkv_bias, output_bias, gate_and_up_bias, down_bias;  // empty: none
};

struct Task {
  int64_t sequence, kv_head, first, tokens;  // tokens from `first` of the sequence's own in this step
};

}  // namespace

struct Decoder::State {
  DecoderShape shape;
  Team team;
  Attend attend;
  const RowKernels& kernels;
  std::vector<Layer> layers;
  std::vector<float> final_norm;
  PackedWeight head;
  AlignedBuffer embedding;  // empty while the head serves as one

  AlignedBuffer hidden, normed, qkv, query, attended, inner, sampled;
  Activations to_qkv, to_output, to_mlp, to_down, to_head;
  std::vector<AlignedBuffer> scratch;  // one per member
  std::vector<Task> tasks;
  const DecoderStep* step = nullptr;

  State(const DecoderShape& given, int threads)
      : shape(given),
        team(threads),
        attend(choose_attention(given.cache)),
        kernels(row_kernels()),
        layers(given.layers),
        final_norm(given.hidden),
        head(given.head_format, given.vocab, given.hidden) {
    const int64_t rows = (shape.most_tokens + row_block - 1) / row_block * row_block;
    const int64_t query_size = shape.heads * shape.head_size, kv_size = shape.kv_heads * shape.head_size;
    for (Layer& layer : layers) {
      layer.qkv = PackedWeight(shape.format, query_size + 2 * kv_size, shape.hidden);
      layer.output = PackedWeight(shape.format, shape.hidden, query_size);
      layer.gate_and_up = PackedWeight(shape.format, 2 * shape.inner, shape.hidden);
      layer.down = PackedWeight(shape.format, shape.hidden, shape.inner);
      layer.attention_norm.resize(shape.hidden);
      layer.mlp_norm.resize(shape.hidden);
    }
    hidden = AlignedBuffer(rows * shape.hidden * 4);
    normed = AlignedBuffer(rows * shape.hidden * 4);
    qkv = AlignedBuffer(rows * (query_size + 2 * kv_size) * 4);
    query = AlignedBuffer(rows * query_size * 4);
    attended = AlignedBuffer(rows * query_size * 4);
    const int64_t mlp_rows = std::min(rows, MLP_ROWS);
    inner = AlignedBuffer(mlp_rows * 2 * shape.inner * 4);
    to_qkv = Activations(shape.format, rows, shape.hidden);
    to_output = Activations(shape.format, rows, query_size);
    to_mlp = Activations(shape.format, mlp_rows, shape.hidden);
    to_down = Activations(shape.format, mlp_rows, shape.inner);
    to_head = Activations(shape.head_format, rows, shape.hidden);
    for (int member = 0; member < threads; ++member) {
      scratch.emplace_back(attention_scratch_bytes(shape.head_size));
    }
  }

  float* row(AlignedBuffer& buffer, int64_t index, int64_t width) { return buffer.as<float>() + index * width; }

  void list_tasks() {
    tasks.clear();
    const int64_t group = shape.heads / shape.kv_heads, most = std::max<int64_t>(1, TASK_ROWS / group);
    for (int64_t sequence = 0; sequence < step->sequences; ++sequence) {
      const int64_t tokens = step->query_starts[sequence + 1] - step->query_starts[sequence];
      // The last tokens of a prompt see most of it: those tasks are the longest and go first.
      for (int64_t end = tokens; end > 0; end -= most) {
        const int64_t first = std::max<int64_t>(0, end - most);
        for (int64_t kv_head = 0; kv_head < shape.kv_heads; ++kv_head) {
          tasks.push_back({sequence, kv_head, first, end - first});
        }
      }
    }
  }

  void embed(Member& member) {
    int64_t begin, end;
    member.share(step->tokens, begin, end);
    for (int64_t token = begin; token < end; ++token) {
      float* to = row(hidden, token, shape.hidden);
      const int64_t id = step->token_ids[token];
      if (embedding.bytes() == 0) {
        unpack_row(head, id, to);
      } else if (shape.cache == CacheType::float32) {
        std::memcpy(to, embedding.as<float>() + id * shape.hidden, shape.hidden * sizeof(float));
      } else {
        const Bfloat16* from = embedding.as<Bfloat16>() + id * shape.hidden;
        std::transform(from, from + shape.hidden, to, [](Bfloat16 value) { return to_float(value); });
      }
    }
  }

  // Norm of rows [begin, begin + count) of the residual stream, into the rows of `into` from 0 on.
  void norm_rows(Member& member, const std::vector<float>& weight, Activations& into, int64_t begin, int64_t count) {
    int64_t first, last;
    member.share(count, first, last);
    for (int64_t index = first; index < last; ++index) {
      float* out = row(normed, index, shape.hidden);
      kernels.rms_norm(row(hidden, begin + index, shape.hidden), weight.data(), shape.epsilon, shape.hidden, out);
    }
    prepare(into, normed.as<float>(), shape.hidden, first, last);
    member.meet();
  }

  void multiply(Member& member, const PackedWeight& weight, const std::vector<float>& bias, const Activations& x,
                int64_t rows, float* out, int64_t stride, Output output) {
    int64_t first, last;
    member.share(weight.panels, first, last);
    multiply_panels(weight, bias, x, rows, first, last, out, stride, output);
    member.meet();
  }

  void multiply_panels(const PackedWeight& weight, const std::vector<float>& bias, const Activations& x, int64_t rows,
                       int64_t first, int64_t last, float* out, int64_t stride, Output output) {
    if (first == last) {
      return;
    }
    matmul(weight, x, {0, rows, first, last}, out, stride, output);
    if (!bias.empty()) {
      const int64_t end = std::min(last * panel_columns, weight.n);
      for (int64_t index = 0; index < rows; ++index) {
        for (int64_t column = first * panel_columns; column < end; ++column) {
          out[index * stride + column] += bias[column];
        }
      }
    }
  }

  void attention(Member& member, Layer& layer, void* cache) {
    const int64_t size = shape.head_size, query_size = shape.heads * size, kv_size = shape.kv_heads * size;
    const int64_t width = query_size + 2 * kv_size, cell = shape.cache == CacheType::float32 ? 4 : 2;
    norm_rows(member, layer.attention_norm, to_qkv, 0, step->tokens);
    multiply(member, layer.qkv, layer.qkv_bias, to_qkv, step->tokens, qkv.as<float>(), width, Output::store);
    int64_t begin, end;
    member.share(step->tokens, begin, end);
    for (int64_t token = begin; token < end; ++token) {
      float* from = row(qkv, token, width);
      const float* cosines = step->cosines + step->positions[token] * size / 2;
      const float* sines = step->sines + step->positions[token] * size / 2;
      for (int64_t head = 0; head < shape.heads + shape.kv_heads; ++head) {
        kernels.rotate(from + head * size, cosines, sines, size);
      }
      kernels.store_query(shape.cache, from, query_size, query.as<char>() + token * query_size * cell);
      const int64_t slot = step->slots[token];
      for (int64_t head = 0; slot >= 0 && head < shape.kv_heads; ++head) {
        const float* key = from + query_size + head * size;
        kernels.write_cache(shape.cache, key, key + kv_size, size, slot / step->block_size, slot % step->block_size,
                            step->block_size, shape.kv_heads, head, cache);
      }
    }
    member.meet();
    const int64_t count = (int64_t)tasks.size();
    for (int64_t index = member.next(count); index >= 0; index = member.next(count)) {
      run_task(tasks[index], cache, scratch[member.index()].as<char>());
    }
    member.meet();
    prepare(to_output, attended.as<float>(), query_size, begin, end);
    member.meet();
    multiply(member, layer.output, layer.output_bias, to_output, step->tokens, hidden.as<float>(), shape.hidden,
             Output::add);
  }

  void run_task(const Task& task, const void* cache, void* memory) {
    const int64_t size = shape.head_size, group = shape.heads / shape.kv_heads, query_size = shape.heads * size;
    const int64_t token = step->query_starts[task.sequence] + task.first;
    const int64_t cell = shape.cache == CacheType::float32 ? 4 : 2,
                  offset = token * query_size + task.kv_head * group * size;
    AttentionTask one{};
    one.query = query.as<char>() + offset * cell;
    one.output = attended.as<float>() + offset;
    one.query_stride = one.output_stride = query_size;
    one.cache = cache;
    one.blocks = step->block_table + task.sequence * step->table_stride;
    one.block_size = step->block_size;
    one.kv_heads = shape.kv_heads;
    one.kv_head = task.kv_head;
    one.group = group;
    one.head_size = size;
    one.tokens = task.tokens;
    one.first_position = step->positions[token];
    one.scale = 1.0f / __builtin_sqrtf((float)size);
    attend(one, memory);
  }

  void mlp(Member& member, Layer& layer) {
    for (int64_t begin = 0; begin < step->tokens; begin += MLP_ROWS) {
      const int64_t rows = std::min(MLP_ROWS, step->tokens - begin), width = 2 * shape.inner;
      norm_rows(member, layer.mlp_norm, to_mlp, begin, rows);
      // A member makes the same columns of gate and up, so the activation needs nobody else's.
      const int64_t half = shape.inner / panel_columns;
      int64_t first, last;
      member.share(half, first, last);
      multiply_panels(layer.gate_and_up, layer.gate_and_up_bias, to_mlp, rows, first, last, inner.as<float>(), width,
                      Output::store);
      multiply_panels(layer.gate_and_up, layer.gate_and_up_bias, to_mlp, rows, half + first, half + last,
                      inner.as<float>(), width, Output::store);
      const int64_t from = first * panel_columns, to = last * panel_columns;
      for (int64_t index = 0; index < rows; ++index) {
        float* gate = row(inner, index, width);
        kernels.silu_and_multiply(gate + from, gate + shape.inner + from, to - from);
      }
      member.meet();
      member.share(rows, first, last);
      prepare(to_down, inner.as<float>(), width, first, last);
      member.meet();
      multiply(member, layer.down, layer.down_bias, to_down, rows, row(hidden, begin, shape.hidden), shape.hidden,
               Output::add);
    }
  }

  void finish(Member& member) {
    int64_t first, last;
    if (step->normed != nullptr) {
      member.share(step->tokens, first, last);
      for (int64_t index = first; index < last; ++index) {
        kernels.rms_norm(row(hidden, index, shape.hidden), final_norm.data(), shape.epsilon, shape.hidden,
                         step->normed + index * shape.hidden);
      }
    }
    member.share(step->sampled, first, last);
    for (int64_t index = first; index < last; ++index) {
      kernels.rms_norm(row(hidden, step->sampled_rows[index], shape.hidden), final_norm.data(), shape.epsilon,
                       shape.hidden, row(normed, index, shape.hidden));
    }
    prepare(to_head, normed.as<float>(), shape.hidden, first, last);
    member.meet();
    if (step->sampled > 0) {
      multiply(member, head, {}, to_head, step->sampled, step->logits, shape.vocab, Output::store);
    }
  }

  // Asked for apart from a step: of states that were handed out.
  const float* given = nullptr;
  int64_t given_rows = 0;
  float* wanted = nullptr;

  void score(Member& member) {
    int64_t first, last;
    member.share(given_rows, first, last);
    prepare(to_head, given, shape.hidden, first, last);
    member.meet();
    multiply(member, head, {}, to_head, given_rows, wanted, shape.vocab, Output::store);
  }

  void live(Member& member) {
    embed(member);
    member.meet();
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

float* Decoder::final_norm() { return state_->final_norm.data(); }
PackedWeight& Decoder::head() { return state_->head; }

void* Decoder::embedding() {
  const DecoderShape& shape = state_->shape;
  if (state_->embedding.bytes() == 0) {
    state_->embedding = AlignedBuffer(shape.vocab * shape.hidden * (shape.cache == CacheType::float32 ? 4 : 2));
  }
  return state_->embedding.as<void>();
}

void Decoder::run(const DecoderStep& step) {
  state_->step = &step;
  state_->list_tasks();
  state_->team.run([](void* state, Member& member) { static_cast<State*>(state)->live(member); }, state_.get());
}

void Decoder::logits(const float* normed, int64_t rows, float* logits) {
  state_->given = normed;
  state_->given_rows = rows;
  state_->wanted = logits;
  state_->team.run([](void* state, Member& member) { static_cast<State*>(state)->score(member); }, state_.get());
}

}  // namespace trivet
