// Everything that the C API does, on random shapes, with buffers that end where they must: to be built with sanitizers.
//
//     random_driver SECONDS [SEED]    cases from SEED on, each with a seed of its own
//     random_driver 0 SEED            that one case
//
// It checks that outputs are finite, nothing else: what they must be is tested elsewhere. The sources of the API are
// included for their structures.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "api.cpp"
#include "attention_api.cpp"
#include "operators_api.cpp"

// What is found ends in an abort, where the case is told.
extern "C" const char* __asan_default_options() { return "abort_on_error=1"; }
extern "C" const char* __ubsan_default_options() { return "abort_on_error=1:halt_on_error=1:print_stacktrace=1"; }

namespace {

uint64_t case_seed;
const char* case_name = "none";

void tell_case() {
  std::fprintf(stderr, "in %s, instruction set %s: random_driver 0 %llu runs this case\n", case_name, trivet_isa(),
               (unsigned long long)case_seed);
}

void abandon(int) {
  tell_case();
  std::_Exit(1);
}

struct Chance {
  std::mt19937_64 engine;
  int64_t between(int64_t least, int64_t most) { return std::uniform_int_distribution<int64_t>(least, most)(engine); }
  bool one_in(int64_t count) { return between(1, count) == 1; }
  float number(float size = 1) { return std::normal_distribution<float>(0, size)(engine); }
  template <typename T>
  T of(std::initializer_list<T> choices) {
    return choices.begin()[between(0, (int64_t)choices.size() - 1)];
  }
};

// Exactly as large as it says, on a line of the cache as torch gives it, so that the next byte is poisoned.
template <typename T>
class Buffer {
 public:
  explicit Buffer(int64_t count) : count_(count) {
    void* data = nullptr;
    if (posix_memalign(&data, 64, std::max<int64_t>(1, count * sizeof(T))) != 0) std::abort();
    std::memset(data, 0, count * sizeof(T));
    data_.reset(static_cast<T*>(data));
  }
  T* get() { return data_.get(); }
  T& operator[](int64_t index) { return data_.get()[index]; }
  int64_t size() const { return count_; }

 private:
  int64_t count_;
  std::unique_ptr<T, decltype(&std::free)> data_{nullptr, &std::free};
};

Buffer<float> floats(Chance& chance, int64_t count, float size = 1) {
  Buffer<float> made(count);
  for (int64_t index = 0; index < count; ++index) made[index] = chance.number(size);
  return made;
}

// Rows of float32 (0) or bfloat16 (1) values, as bytes.
Buffer<char> values(Chance& chance, int type, int64_t count) {
  Buffer<char> made(count * (type == 0 ? 4 : 2));
  for (int64_t index = 0; index < count; ++index) {
    const float value = chance.number();
    if (type == 0) {
      reinterpret_cast<float*>(made.get())[index] = value;
    } else {
      reinterpret_cast<uint16_t*>(made.get())[index] = to_bfloat16(value);
    }
  }
  return made;
}

void must_be_finite(Buffer<float>& numbers) {
  for (int64_t index = 0; index < numbers.size(); ++index) {
    if (std::isfinite(numbers[index])) continue;
    std::fprintf(stderr, "output %lld is %g\n", (long long)index, numbers[index]);
    tell_case();
    std::exit(1);
  }
}

// A kind of GGUF blocks: its size, and where its half-precision numbers lie.
struct BlockKind {
  WeightFormat format;
  int64_t bytes, values;
  std::vector<int64_t> halves;
};
const std::vector<BlockKind> block_kinds{
    {WeightFormat::q4_0, 18, 32, {0}},      {WeightFormat::q4_1, 20, 32, {0, 2}},
    {WeightFormat::q8_0, 34, 32, {0}},      {WeightFormat::q5_0, 22, 32, {0}},
    {WeightFormat::q5_1, 24, 32, {0, 2}},   {WeightFormat::q4_k, 144, 256, {0, 2}},
    {WeightFormat::q5_k, 176, 256, {0, 2}}, {WeightFormat::q6_k, 210, 256, {208}},
};

WeightFormat any_format(Chance& chance) { return (WeightFormat)chance.between(0, (int64_t)WeightFormat::q8_minimum); }
bool is_blocks(WeightFormat format) { return format >= WeightFormat::q4_0; }
const BlockKind* kind_of(WeightFormat format) {
  for (const BlockKind& kind : block_kinds) {
    if (kind.format == format) return &kind;
  }
  return nullptr;  // a format that no file has
}
// A width that the format takes must be a multiple of this.
int64_t multiple_of(WeightFormat format) {
  const BlockKind* kind = kind_of(format);
  return kind != nullptr ? kind->values : is_blocks(format) ? 32 : 1;
}

// Rows of a weight [n, k] as blocks of the kind, with small scales.
struct StoredRows {
  StoredRows(Chance& chance, const BlockKind& kind, int64_t n, int64_t k)
      : kind((int32_t)kind.format), row_bytes(k / kind.values * kind.bytes), bytes(n * row_bytes) {
    for (int64_t index = 0; index < bytes.size(); ++index) bytes[index] = (uint8_t)chance.between(0, 255);
    for (int64_t at = 0; at < bytes.size(); at += kind.bytes) {
      for (int64_t half : kind.halves) bytes[at + half + 1] = 0x20;  // the exponent
    }
  }
  const uint8_t* from(int64_t row) { return bytes.get() + row * row_bytes; }

  int32_t kind;
  int64_t row_bytes;
  Buffer<uint8_t> bytes;
};

// The blocks that a weight [., k] of this format may be filled from; null: float rows.
const BlockKind* any_source(Chance& chance, WeightFormat format, int64_t k) {
  if (const BlockKind* own = kind_of(format)) return own;
  const BlockKind& other = block_kinds[chance.between(0, (int64_t)block_kinds.size() - 1)];
  return chance.one_in(2) && k % other.values == 0 ? &other : nullptr;
}

// ---- paged sequences ----

struct Sequences {
  int64_t count, block_size, stride, blocks;
  std::vector<int64_t> starts{0}, lengths, positions, slots;
  Buffer<int32_t> table;
};

// Random lengths, a random tail of each in this step; some share the blocks of what lies before.
Sequences sequences(Chance& chance, int64_t most_tokens) {
  const int64_t count = chance.between(1, 5), block_size = 16 * chance.between(1, 4);
  const int64_t longest = chance.one_in(4) ? 700 : 120;
  std::vector<int64_t> lengths, starts{0};
  for (int64_t index = 0; index < count && starts.back() < most_tokens; ++index) {
    const int64_t length = chance.between(1, longest);
    const int64_t most = std::min(length, most_tokens - starts.back());
    lengths.push_back(length);
    starts.push_back(starts.back() + (chance.one_in(2) ? 1 : chance.between(1, most)));
  }
  const int64_t made = (int64_t)lengths.size();
  const int64_t stride = (*std::max_element(lengths.begin(), lengths.end()) + block_size - 1) / block_size;
  Sequences all{made, block_size, stride, 0, starts, lengths, {}, {}, Buffer<int32_t>(made * stride)};
  int32_t next = 1;
  const bool shares = chance.one_in(2);
  for (int64_t row = 0; row < made; ++row) {
    const int64_t tokens = starts[row + 1] - starts[row], before = lengths[row] - tokens;
    for (int64_t block = 0; block < (lengths[row] + block_size - 1) / block_size; ++block) {
      const bool is_old = (block + 1) * block_size <= before && (block + 1) * block_size <= lengths[0] - tokens;
      all.table[row * stride + block] = shares && row > 0 && is_old ? all.table[block] : next++;
    }
    for (int64_t token = 0; token < tokens; ++token) {
      const int64_t position = before + token;
      all.positions.push_back(position);
      const int64_t block = all.table[row * stride + position / block_size];
      all.slots.push_back(chance.one_in(50) ? -1 : block * block_size + position % block_size);
    }
  }
  all.blocks = next;
  return all;
}

int64_t cache_bytes(CacheType type, const Sequences& all, int64_t kv_heads, int64_t head_size) {
  return all.blocks * kv_heads * (all.block_size / SUB_BLOCK) * sub_block_bytes(type, head_size);
}

CacheType any_cache(Chance& chance) { return (CacheType)chance.between(0, 3); }

// ---- cases ----

void fill(Chance& chance, void* decoder, int64_t layer, LayerPart part, WeightFormat format, int64_t n, int64_t k) {
  if (format == WeightFormat::mixed) {
    std::vector<std::pair<const BlockKind*, int64_t>> added;
    for (int64_t left = n; left > 0; left -= added.back().second) {
      const BlockKind* kind = &block_kinds[chance.between(0, (int64_t)block_kinds.size() - 1)];
      added.emplace_back(k % kind->values == 0 ? kind : &block_kinds[0], 32 * chance.between(1, left / 32));
      trivet_decoder_add_rows(decoder, layer, (int32_t)part, (int32_t)added.back().first->format, added.back().second);
    }
    int64_t first = 0;
    for (const auto& [kind, count] : added) {
      StoredRows rows(chance, *kind, count, k);
      trivet_decoder_fill_blocks(decoder, layer, (int32_t)part, rows.kind, rows.from(0), first, count);
      first += count;
    }
    return;
  }
  const int64_t cut = chance.between(0, n / 32) * 32;
  if (const BlockKind* kind = any_source(chance, format, k)) {
    StoredRows rows(chance, *kind, n, k);
    trivet_decoder_fill_blocks(decoder, layer, (int32_t)part, rows.kind, rows.from(0), 0, cut);
    trivet_decoder_fill_blocks(decoder, layer, (int32_t)part, rows.kind, rows.from(cut), cut, n - cut);
    return;
  }
  const int type = chance.one_in(2);
  Buffer<char> rows = values(chance, type, n * k);
  trivet_decoder_fill(decoder, layer, (int32_t)part, rows.get(), type, 0, cut);
  trivet_decoder_fill(decoder, layer, (int32_t)part, rows.get() + cut * k * (type == 0 ? 4 : 2), type, cut, n - cut);
}

void run_step(Chance& chance, void* decoder, const TrivetShape& shape) {
  Sequences all = sequences(chance, shape.most_tokens);
  const int64_t tokens = all.starts.back();
  Buffer<int64_t> ids(tokens), positions(tokens), slots(tokens), starts(all.count + 1);
  std::copy(all.positions.begin(), all.positions.end(), positions.get());
  std::copy(all.slots.begin(), all.slots.end(), slots.get());
  std::copy(all.starts.begin(), all.starts.end(), starts.get());
  for (int64_t token = 0; token < tokens; ++token) ids[token] = chance.between(0, shape.vocab - 1);
  const int64_t furthest = *std::max_element(all.positions.begin(), all.positions.end()) + 1;
  Buffer<float> cosines = floats(chance, furthest * shape.head_size / 2);
  Buffer<float> sines = floats(chance, furthest * shape.head_size / 2);
  std::vector<Buffer<char>> caches;
  std::vector<void*> addresses;
  for (int64_t layer = 0; layer < shape.layers; ++layer) {
    caches.emplace_back(cache_bytes((CacheType)shape.cache, all, shape.kv_heads, shape.head_size));
    addresses.push_back(caches.back().get());
  }
  const int64_t sampled = chance.between(0, std::min<int64_t>(tokens, 9));
  Buffer<int64_t> rows(sampled);
  for (int64_t row = 0; row < sampled; ++row) rows[row] = chance.between(0, tokens - 1);
  Buffer<float> logits(sampled * shape.vocab), normed(chance.one_in(3) ? tokens * shape.hidden : 0);
  DecoderStep step{};
  step.tokens = tokens;
  step.token_ids = ids.get();
  step.positions = positions.get();
  step.slots = slots.get();
  step.sequences = all.count;
  step.query_starts = starts.get();
  step.block_table = all.table.get();
  step.table_stride = all.stride;
  step.block_size = all.block_size;
  step.shares_prefixes = chance.one_in(2);
  step.cosines = cosines.get();
  step.sines = sines.get();
  step.caches = chance.one_in(12) ? nullptr : addresses.data();
  step.sampled = sampled;
  step.sampled_rows = rows.get();
  step.logits = logits.get();
  step.normed = normed.size() ? normed.get() : nullptr;
  trivet_decoder_run(decoder, &step);
  must_be_finite(logits);
  must_be_finite(normed);
  if (normed.size()) {
    Buffer<float> again(tokens * shape.vocab);
    trivet_decoder_logits(decoder, normed.get(), tokens, again.get());
    must_be_finite(again);
  }
}

void decoder_steps(Chance& chance) {
  TrivetShape shape{};
  shape.layers = chance.between(1, 2);
  shape.kv_heads = chance.between(1, 3);
  shape.heads = shape.kv_heads * chance.between(1, 4);
  shape.head_size = 32 * chance.between(1, 4);
  shape.inner = 32 * chance.between(1, 5);
  shape.vocab = chance.between(1, 300);
  shape.most_tokens = chance.of<int64_t>({1, 3, 17, 70, 300});
  const WeightFormat format = chance.one_in(6) ? WeightFormat::mixed : any_format(chance);
  const WeightFormat head_format = any_format(chance);
  shape.format = (int32_t)format;
  shape.head_format = (int32_t)head_format;
  shape.cache = (int32_t)any_cache(chance);
  if (multiple_of(format) > 32 || (format == WeightFormat::mixed && chance.one_in(2))) {  // all widths in super-blocks
    shape.head_size = 64;
    shape.heads = 4;
    shape.kv_heads = chance.of<int64_t>({1, 2, 4});
    shape.inner = 256;
    shape.hidden = 256 * chance.between(1, 2);
  } else if (is_blocks(format) || is_blocks(head_format)) {
    shape.hidden = multiple_of(head_format) > 32 ? 256 : 32 * chance.between(1, 6);
  } else {
    shape.hidden = chance.between(1, 200);
  }
  shape.threads = (int32_t)chance.between(1, 3);
  shape.epsilon = 1e-5f;
  void* decoder = trivet_decoder_create(&shape);
  if (decoder == nullptr) return;
  const int64_t query = shape.heads * shape.head_size, kv = shape.kv_heads * shape.head_size;
  for (int64_t layer = 0; layer < shape.layers; ++layer) {
    struct {
      LayerPart part;
      int64_t n, k;
    } const parts[] = {{LayerPart::qkv, query + 2 * kv, shape.hidden},
                       {LayerPart::output, shape.hidden, query},
                       {LayerPart::gate_and_up, 2 * shape.inner, shape.hidden},
                       {LayerPart::down, shape.hidden, shape.inner}};
    for (const auto& one : parts) {
      fill(chance, decoder, layer, one.part, format, one.n, one.k);
      if (!chance.one_in(3)) continue;
      float* bias = trivet_decoder_bias(decoder, layer, (int32_t)one.part);
      for (int64_t index = 0; index < one.n; ++index) bias[index] = chance.number();
    }
    for (LayerPart part : {LayerPart::attention_norm, LayerPart::mlp_norm}) {
      std::fill_n(trivet_decoder_norm(decoder, layer, (int32_t)part), shape.hidden, 1.0f);
    }
    if (chance.one_in(3)) static_cast<Decoder*>(decoder)->use_window(layer, chance.between(1, 300));
  }
  std::fill_n(trivet_decoder_norm(decoder, -1, 0), shape.hidden, 1.0f);
  fill(chance, decoder, -1, LayerPart::down, head_format, shape.vocab, shape.hidden);
  if (chance.one_in(2)) {
    const int64_t cell = query_cell_bytes((CacheType)shape.cache);
    Buffer<char> rows = values(chance, cell == 4 ? 0 : 1, shape.vocab * shape.hidden);
    std::memcpy(trivet_decoder_embedding(decoder), rows.get(), rows.size());
  }
  for (int64_t steps = chance.between(1, 4); steps > 0; --steps) run_step(chance, decoder, shape);
  trivet_decoder_destroy(decoder);
}

void attention(Chance& chance) {
  const CacheType type = any_cache(chance);
  TrivetAttention call{};
  call.kv_heads = chance.between(1, 3);
  call.heads = call.kv_heads * chance.between(1, 5);
  call.head_size = 32 * chance.between(1, 8);
  Sequences all = sequences(chance, 200);
  const int64_t tokens = all.starts.back(), row = call.heads * call.head_size;
  const int narrow_type = multiplies_float32(type) ? 0 : 1;
  call.query_stride = row + chance.between(0, 2) * 32;
  Buffer<char> query = values(chance, narrow_type, (tokens - 1) * call.query_stride + row);
  Buffer<char> cache(cache_bytes(type, all, call.kv_heads, call.head_size));
  call.is_output_bfloat16 = chance.one_in(2);
  Buffer<char> output(tokens * row * (call.is_output_bfloat16 ? 2 : 4));
  Buffer<int64_t> starts(all.count + 1), lengths(all.count);
  std::copy(all.starts.begin(), all.starts.end(), starts.get());
  std::copy(all.lengths.begin(), all.lengths.end(), lengths.get());
  call.query = query.get();
  call.output = output.get();
  call.cache = cache.get();
  call.block_table = all.table.get();
  call.table_stride = all.stride;
  call.query_starts = starts.get();
  call.lengths = lengths.get();
  call.sequences = all.count;
  call.block_size = all.block_size;
  call.window = chance.one_in(2) ? 0 : chance.between(1, 400);
  call.cache_type = (int32_t)type;
  call.shares_prefixes = chance.one_in(2);
  call.scale = 0.125f;
  call.soft_cap = chance.one_in(3) ? 20.0f : 0.0f;
  trivet_paged_attention(&call);
}

void rows(Chance& chance) {
  const int type = chance.one_in(2);
  const int64_t count = chance.between(1, 200), size = chance.between(1, 400), stride = size + chance.between(0, 9);
  Buffer<char> x = values(chance, type, (count - 1) * stride + size), out = values(chance, type, count * size);
  Buffer<char> residual = values(chance, type, (count - 1) * stride + size);
  Buffer<float> weight = floats(chance, size);
  trivet_rms_norm(type, x.get(), stride, chance.one_in(2) ? residual.get() : nullptr, stride, weight.get(), 1e-5f,
                  count, size, out.get());
  const int64_t inner = chance.between(1, 300);
  Buffer<char> gates = values(chance, type, count * 2 * inner), gated(count * inner * (type == 0 ? 4 : 2));
  trivet_gated(chance.one_in(2), type, gates.get(), 2 * inner, count, inner, gated.get());
}

void rotation(Chance& chance) {
  const CacheType cache_type = any_cache(chance);
  const int type = multiplies_float32(cache_type) ? 0 : 1;
  const int64_t kv_heads = chance.between(1, 3), heads = kv_heads * chance.between(1, 3),
                size = 32 * chance.between(1, 4);
  Sequences all = sequences(chance, 150);
  const int64_t tokens = all.starts.back();
  Buffer<char> query = values(chance, type, tokens * heads * size),
               key = values(chance, type, tokens * kv_heads * size);
  Buffer<char> value = values(chance, type, tokens * kv_heads * size), out(query.size());
  Buffer<char> cache(cache_bytes(cache_type, all, kv_heads, size));
  Buffer<float> cosines = floats(chance, tokens * size / 2), sines = floats(chance, tokens * size / 2);
  Buffer<int64_t> slots(tokens);
  std::copy(all.slots.begin(), all.slots.end(), slots.get());
  const TrivetAngles angles{cosines.get(), sines.get(), size / 2, size / 2};
  const TrivetHeads queries{query.get(), heads * size, size, heads}, keys{key.get(), kv_heads * size, size, kv_heads};
  const TrivetHeads given{value.get(), kv_heads * size, size, kv_heads};
  const TrivetCache target{cache.get(), (int64_t)cache_type, all.blocks, all.block_size, kv_heads, slots.get()};
  trivet_rotate_and_write(type, tokens, size, &angles, &queries, out.get(), &keys, &given,
                          chance.one_in(5) ? nullptr : &target);
}

void product(Chance& chance) {
  const WeightFormat format = any_format(chance);
  TrivetPacked packed{nullptr, chance.between(1, 200), chance.between(1, 300), (int32_t)format};
  if (is_blocks(format)) packed.k = multiple_of(format) * chance.between(1, multiple_of(format) > 32 ? 2 : 8);
  Buffer<char> memory(trivet_packed_bytes(&packed));
  packed.data = memory.get();
  const int64_t n = packed.n, k = packed.k, cut = chance.between(0, n / 32) * 32;
  if (const BlockKind* kind = any_source(chance, format, k)) {
    StoredRows rows(chance, *kind, n, k);
    trivet_pack_blocks(&packed, rows.kind, rows.from(0), 0, cut);
    trivet_pack_blocks(&packed, rows.kind, rows.from(cut), cut, n - cut);
  } else {
    const int source = chance.one_in(2);
    Buffer<char> from = values(chance, source, n * k);
    trivet_pack(&packed, source, from.get(), 0, n);
  }
  const int type = chance.one_in(2);
  const int64_t count = chance.one_in(3) ? chance.between(1, 200) : chance.between(1, 20),
                stride = k + chance.between(0, 5);
  Buffer<char> x = values(chance, type, (count - 1) * stride + k), out(count * n * (type == 0 ? 4 : 2));
  Buffer<float> bias = floats(chance, n), sums(type == 0 ? 0 : count * n);
  trivet_linear(&packed, type, x.get(), stride, count, chance.one_in(2) ? bias.get() : nullptr, out.get(), sums.get());
  Buffer<int64_t> picked(3);
  for (int64_t index = 0; index < 3; ++index) picked[index] = chance.between(0, n - 1);
  Buffer<float> back(3 * k);
  trivet_packed_rows(&packed, picked.get(), 3, back.get());
  must_be_finite(back);
}

Buffer<int32_t> constraints(Chance& chance, int64_t vocab) {
  const int64_t allowed = chance.one_in(3) ? chance.between(0, vocab) : -1, biases = chance.between(0, 9);
  const int64_t words = chance.between(0, 4), ends = chance.between(0, 3);
  std::vector<int32_t> sizes, packed{(int32_t)allowed, (int32_t)biases, (int32_t)words, 0, (int32_t)ends};
  for (int64_t word = 0; word < words; ++word) {
    sizes.push_back((int32_t)chance.between(1, 3));
    packed[3] += sizes.back();
  }
  const auto put_ids = [&](int64_t count) {
    for (int64_t index = 0; index < count; ++index) packed.push_back((int32_t)chance.between(0, vocab - 1));
  };
  put_ids(std::max<int64_t>(0, allowed));
  put_ids(biases);
  for (int64_t index = 0; index < biases; ++index) {
    const float bias = chance.number(10);
    packed.push_back(0);
    std::memcpy(&packed.back(), &bias, 4);
  }
  packed.insert(packed.end(), sizes.begin(), sizes.end());
  put_ids(packed[3] + ends);
  Buffer<int32_t> made((int64_t)packed.size());
  std::copy(packed.begin(), packed.end(), made.get());
  return made;
}

void sampling(Chance& chance) {
  const int64_t vocab = chance.one_in(3) ? chance.between(3000, 20000) : chance.between(1, 300);
  const int64_t count = chance.between(1, 9), longest = 40;
  Buffer<float> logits = floats(chance, count * vocab, chance.of({0.0f, 1.0f, 5.0f})), kept(count * vocab);
  for (int64_t wild = chance.between(0, 3); wild > 0 && chance.one_in(2); --wild) {
    logits[chance.between(0, logits.size() - 1)] = chance.of({NAN, INFINITY, -INFINITY});
  }
  std::copy_n(logits.get(), logits.size(), kept.get());
  Buffer<int64_t> slots(count), lengths(count), prompts(count), top_k(count), tokens(count);
  Buffer<int32_t> ids(count * longest), min_tokens(count);
  Buffer<uint64_t> seeds(count);
  Buffer<float> temperature(count), top_p(count), min_p(count), presence(count), frequency(count), repetition(count);
  Buffer<float> shifts(count);
  Buffer<uint8_t> flags(count);
  std::vector<Buffer<int32_t>> given;
  std::vector<const int32_t*> addresses(count, nullptr);
  for (int64_t row = 0; row < count; ++row) {
    slots[row] = count - 1 - row;
    lengths[row] = chance.between(1, longest);
    prompts[row] = chance.between(1, lengths[row]);
    seeds[row] = chance.engine();
    temperature[row] = chance.of({0.0f, 1e-3f, 1.0f, 2.0f});
    top_p[row] = chance.of({1.0f, 0.9f, 1e-4f});
    top_k[row] = chance.of<int64_t>({0, 1, 7, vocab - 1});
    min_p[row] = chance.of({0.0f, 0.1f, 1.0f});
    presence[row] = chance.of({0.0f, 1.5f});
    frequency[row] = chance.of({0.0f, -0.5f});
    repetition[row] = chance.of({1.0f, 1.2f});
    min_tokens[row] = (int32_t)chance.between(0, 20);
    if (!chance.one_in(2)) continue;
    given.push_back(constraints(chance, vocab));
    addresses[row] = given.back().get();
  }
  for (int64_t index = 0; index < ids.size(); ++index) ids[index] = (int32_t)chance.between(0, vocab - 1);
  SamplingBatch batch{count,
                      vocab,
                      logits.get(),
                      slots.get(),
                      lengths.get(),
                      prompts.get(),
                      ids.get(),
                      longest,
                      seeds.get(),
                      temperature.get(),
                      top_p.get(),
                      top_k.get(),
                      min_p.get(),
                      presence.get(),
                      frequency.get(),
                      repetition.get(),
                      min_tokens.get(),
                      addresses.data(),
                      tokens.get(),
                      flags.get(),
                      shifts.get(),
                      7,
                      (int32_t)chance.one_in(2)};
  void* sampler = trivet_sampler_create(vocab, (int32_t)chance.between(1, 3));
  trivet_sampler_run(sampler, &batch);
  std::vector<int32_t> widths, wanted;
  std::vector<uint8_t> is_wanted, is_plain;
  int64_t entries = 0;
  for (int64_t row = 0; row < count; ++row) {
    widths.push_back((int32_t)chance.between(0, chance.one_in(4) ? vocab : std::min<int64_t>(vocab, 20)));
    is_wanted.push_back(chance.one_in(3));
    is_plain.push_back(chance.one_in(3));
    for (int32_t index = 0; is_wanted.back() && index < widths.back(); ++index) {
      wanted.push_back((int32_t)chance.between(0, vocab - 1));
    }
    entries += widths.back() + 1;
  }
  Buffer<int32_t> picked(entries), ranks(count);
  Buffer<float> scores(entries);
  const LogprobRequest request{count,         vocab,         kept.get(),       tokens.get(),
                               widths.data(), wanted.data(), is_wanted.data(), is_plain.data(),
                               shifts.get(),  picked.get(),  scores.get(),     ranks.get()};
  trivet_sampler_pick(sampler, &request);
  must_be_finite(scores);
  trivet_sampler_destroy(sampler);
}

void run_case(uint64_t seed) {
  case_seed = seed;
  Chance chance{std::mt19937_64(seed)};
  const char* levels[] = {"plain", "avx2", "avx512", "amx"};
  while (!trivet_use_isa(levels[chance.between(0, 3)])) {
  }
  trivet_operators_use_threads((int32_t)chance.between(1, 3));
  struct {
    const char* name;
    void (*run)(Chance&);
  } const cases[] = {{"decoder steps", decoder_steps}, {"attention", attention}, {"rows", rows},
                     {"rotation", rotation},           {"product", product},     {"sampling", sampling}};
  const auto& one = cases[chance.one_in(3) ? 0 : chance.between(0, 5)];
  case_name = one.name;
  one.run(chance);
}

}  // namespace

int main(int count, char** arguments) {
  const double seconds = count > 1 ? std::atof(arguments[1]) : 10;
  const uint64_t first = count > 2 ? std::strtoull(arguments[2], nullptr, 10) : std::random_device{}();
  std::signal(SIGABRT, abandon);
  using Clock = std::chrono::steady_clock;
  const auto begun = Clock::now();
  double told = 0;
  uint64_t done = 0;
  std::printf("seed %llu\n", (unsigned long long)first);
  for (;; ++done) {
    const double passed = std::chrono::duration<double>(Clock::now() - begun).count();
    if (done > 0 && passed >= seconds) break;
    if (passed >= told + 10) {
      told = passed;
      std::printf("%.0f s of %.0f: %llu cases\n", passed, seconds, (unsigned long long)done);
      std::fflush(stdout);
    }
    run_case(first + done);
  }
  std::printf("%llu cases, all right\n", (unsigned long long)done);
  return 0;
}
