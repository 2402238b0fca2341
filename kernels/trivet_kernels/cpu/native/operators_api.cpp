// Single operators as Python calls them, over the team of the process. Shapes, types and strides are checked on the
// other side; the last dimension of every array is contiguous, the others have strides in elements.
#include <cstring>
#include <stdexcept>
#include <vector>

#include "operator_team.h"
#include "rows.h"
#include "vector.h"

using namespace trivet;

namespace {

using Type = CacheType;  // of activations

int64_t size_of(Type type) { return type == Type::float32 ? 4 : 2; }

const char* at(Type type, const void* base, int64_t index) {
  return static_cast<const char*>(base) + index * size_of(type);
}
char* at(Type type, void* base, int64_t index) { return static_cast<char*>(base) + index * size_of(type); }

float* floats_of_thread(int64_t count) {
  thread_local std::vector<float> floats;
  if ((int64_t)floats.size() < count) floats.resize(count);
  return floats.data();
}

void widen(Type type, const void* from, int64_t size, float* to) {
  if (type == Type::float32) {
    std::memcpy(to, from, size * sizeof(float));
    return;
  }
  const auto* values = static_cast<const Bfloat16*>(from);
  for (int64_t index = 0; index < size; ++index) to[index] = to_float(values[index]);
}

void narrow(Type type, const float* from, int64_t size, void* to) {
  if (type == Type::float32) {
    std::memcpy(to, from, size * sizeof(float));
    return;
  }
  auto* values = static_cast<Bfloat16*>(to);
  for (int64_t index = 0; index < size; ++index) values[index] = to_bfloat16(from[index]);
}

}  // namespace

extern "C" {

void trivet_operators_use_threads(int32_t count) { OperatorTeam::shared().use_threads(count); }

// out [rows][size] = rms norm of x, or, with a residual, of residual += x.
void trivet_rms_norm(int32_t type_number, const void* x, int64_t x_stride, void* residual, int64_t residual_stride,
                     const float* weight, float epsilon, int64_t rows, int64_t size, void* out) {
  const Type type = (Type)type_number;
  const RowKernels& kernels = row_kernels();
  OperatorTeam::shared().share_out(rows, size, [&](int64_t begin, int64_t end) {
    float* row = floats_of_thread(3 * size);
    float *sum = row + size, *normed = sum + size;
    for (int64_t index = begin; index < end; ++index) {
      widen(type, at(type, x, index * x_stride), size, row);
      if (residual != nullptr) {
        char* kept = at(type, residual, index * residual_stride);
        widen(type, kept, size, sum);
        for (int64_t place = 0; place < size; ++place) sum[place] += row[place];
        narrow(type, sum, size, kept);
        widen(type, kept, size, row);
      }
      kernels.rms_norm(row, weight, epsilon, size, normed);
      narrow(type, normed, size, at(type, out, index * size));
    }
  });
}

// out [rows][inner] = activation(gate) * up of x [rows][2 * inner].
void trivet_gated(int32_t is_gelu, int32_t type_number, const void* x, int64_t x_stride, int64_t rows, int64_t inner,
                  void* out) {
  const Type type = (Type)type_number;
  const RowKernels& kernels = row_kernels();
  const auto activate = is_gelu ? kernels.gelu_tanh_and_multiply : kernels.silu_and_multiply;
  OperatorTeam::shared().share_out(rows, 2 * inner, [&](int64_t begin, int64_t end) {
    float* row = floats_of_thread(2 * inner);
    for (int64_t index = begin; index < end; ++index) {
      widen(type, at(type, x, index * x_stride), 2 * inner, row);
      activate(row, row + inner, inner);
      narrow(type, row, inner, at(type, out, index * inner));
    }
  });
}

// Heads of every token: [tokens][heads][size] with strides.
struct TrivetHeads {
  const void* data;
  int64_t token_stride, head_stride, heads;
};

struct TrivetAngles {
  const float *cosines, *sines;  // [tokens][size / 2]; null: none
  int64_t cosine_stride, sine_stride;
};

struct TrivetCache {
  void* data;
  int64_t type, blocks, block_size, kv_heads;
  const int64_t* slots;  // [tokens], negative: not written
};

// Rotated query into `out` [tokens][heads][size], and key (rotated where there are angles) and value into the cache;
// either may be absent. Gives the first slot outside the cache, before which nothing is written, or -1.
int64_t trivet_rotate_and_write(int32_t type_number, int64_t tokens, int64_t size, const TrivetAngles* angles,
                                const TrivetHeads* query, void* out, const TrivetHeads* key, const TrivetHeads* value,
                                const TrivetCache* cache) {
  const Type type = (Type)type_number;
  const RowKernels& kernels = row_kernels();
  for (int64_t token = 0; cache != nullptr && token < tokens; ++token) {
    if (cache->slots[token] >= cache->blocks * cache->block_size) return cache->slots[token];
  }
  const int64_t heads = (query == nullptr ? 0 : query->heads) + (cache == nullptr ? 0 : 2 * cache->kv_heads);
  OperatorTeam::shared().share_out(tokens, heads * size, [&](int64_t begin, int64_t end) {
    float* row = floats_of_thread(size);
    for (int64_t token = begin; token < end; ++token) {
      const auto load_head = [&](const TrivetHeads& from, int64_t head, bool is_rotated, float* to) {
        widen(type, at(type, from.data, token * from.token_stride + head * from.head_stride), size, to);
        if (is_rotated) {
          kernels.rotate(to, angles->cosines + token * angles->cosine_stride,
                         angles->sines + token * angles->sine_stride, size);
        }
      };
      for (int64_t head = 0; query != nullptr && head < query->heads; ++head) {
        load_head(*query, head, true, row);
        narrow(type, row, size, at(type, out, (token * query->heads + head) * size));
      }
      if (cache == nullptr || cache->slots[token] < 0) continue;
      const CacheShape shape{(CacheType)cache->type, cache->block_size, cache->kv_heads, size};
      for (int64_t head = 0; head < cache->kv_heads; ++head) {
        const CachePlace place = shape.place(cache->data, cache->slots[token], head);
        load_head(*key, head, angles != nullptr, row);
        kernels.write_key(place, row, size);
        load_head(*value, head, false, row);
        kernels.write_value(place, row, size);
      }
    }
  });
  return -1;
}

// The first sequence whose tokens, cached length or blocks are not what attention may read, or -1.
int64_t trivet_attention_fault(const int64_t* starts, const int64_t* lengths, int64_t sequences, int64_t tokens,
                               const int32_t* table, int64_t columns, int64_t block_size, int64_t blocks) {
  if (sequences == 0) return tokens == 0 ? -1 : 0;
  if (starts[0] != 0 || starts[sequences] != tokens) return 0;
  for (int64_t sequence = 0; sequence < sequences; ++sequence) {
    const int64_t count = starts[sequence + 1] - starts[sequence], length = lengths[sequence];
    if (count < 0 || length < count || length > columns * block_size) return sequence;
    for (int64_t column = 0; column * block_size < length; ++column) {
      const int32_t block = table[sequence * columns + column];
      if (block < 0 || block >= blocks) return sequence;
    }
  }
  return -1;
}

// ---- packed weights, in memory of the caller's ----

struct TrivetPacked {
  void* data;
  int64_t n, k;
  int32_t format;  // WeightFormat
};

}  // extern "C"

namespace {

PackedWeight weight_of(const TrivetPacked& packed) {
  PackedWeight weight = PackedWeight::without_memory((WeightFormat)packed.format, packed.n, packed.k);
  weight.data = AlignedBuffer::borrowed(packed.data, weight.bytes());
  return weight;
}

}  // namespace

extern "C" {

// Bytes that such a weight takes; -1 when the format does not take such sizes.
int64_t trivet_packed_bytes(const TrivetPacked* packed) {
  try {
    return weight_of(*packed).bytes();
  } catch (const std::invalid_argument&) {
    return -1;
  }
}

// Rows [first, first + count) out of float32 (0) or bfloat16 (1) rows.
void trivet_pack(const TrivetPacked* packed, int32_t source, const void* rows, int64_t first, int64_t count) {
  PackedWeight weight = weight_of(*packed);
  if (source == 1) {
    pack_bf16(weight, static_cast<const uint16_t*>(rows), first, first + count);
  } else {
    pack_f32(weight, static_cast<const float*>(rows), first, first + count);
  }
}

// The same out of GGUF blocks of a kind (WeightFormat).
void trivet_pack_blocks(const TrivetPacked* packed, int32_t kind, const void* rows, int64_t first, int64_t count) {
  PackedWeight weight = weight_of(*packed);
  pack_blocks(weight, (WeightFormat)kind, static_cast<const uint8_t*>(rows), first, first + count);
}

// out [count][k] float32: rows of the weight as they are multiplied, dequantised. Gives the first row that is not
// there, or -1.
int64_t trivet_packed_rows(const TrivetPacked* packed, const int64_t* rows, int64_t count, float* out) {
  const PackedWeight weight = weight_of(*packed);
  for (int64_t index = 0; index < count; ++index) {
    if (rows[index] < 0 || rows[index] >= weight.n) return index;
  }
  OperatorTeam::shared().share_out(count, weight.k, [&](int64_t begin, int64_t end) {
    for (int64_t index = begin; index < end; ++index) unpack_row(weight, rows[index], out + index * weight.k);
  });
  return -1;
}

// out [rows][n] = x [rows][k] · weightᵀ + bias (or null); `sums` is room for rows · n floats where out is not float32.
void trivet_linear(const TrivetPacked* packed, int32_t type_number, const void* x, int64_t x_stride, int64_t rows,
                   const float* bias, void* out, float* sums) {
  const Type type = (Type)type_number;
  const PackedWeight weight = weight_of(*packed);
  float* product = type == Type::float32 ? static_cast<float*>(out) : sums;
  OperatorTeam::shared().run_with(weight.format, rows, weight.k, [&](Activations& lines, Member& member) {
    int64_t begin, end;
    member.share(rows, begin, end);
    float* row = floats_of_thread(weight.k);
    for (int64_t index = begin; index < end; ++index) {
      widen(type, at(type, x, index * x_stride), weight.k, row);
      prepare(lines, row, 0, index, index + 1);  // a stride of 0: the row itself, whatever its number
    }
    member.meet();
    int64_t first, last;
    member.share(weight.panels, first, last);
    if (first < last) {
      matmul(weight, lines, {0, rows, first, last}, product, weight.n, Output::store);
      const int64_t from = first * panel_columns,
                    to = last * panel_columns < weight.n ? last * panel_columns : weight.n;
      for (int64_t index = 0; index < rows; ++index) {
        float* made = product + index * weight.n;
        for (int64_t column = from; bias != nullptr && column < to; ++column) made[column] += bias[column];
        if (type != Type::float32) narrow(type, made + from, to - from, at(type, out, index * weight.n + from));
      }
    }
  });
}
}
