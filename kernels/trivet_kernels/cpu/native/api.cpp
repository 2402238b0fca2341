// What Python calls: plain C functions over the decoder, for ctypes. Errors of the caller are checked on the other
// side.
#include <cstring>
#include <exception>

#include "decoder.h"
#include "isa.h"
#include "sampling.h"

using namespace trivet;

extern "C" {

struct TrivetShape {
  int64_t layers, hidden, heads, kv_heads, head_size, inner, vocab, most_tokens;
  int32_t cache, format, head_format, threads;  // cache: CacheType; formats: WeightFormat
  float epsilon;
};

// Null when there is not enough memory.
void* trivet_decoder_create(const TrivetShape* shape) {
  const DecoderShape given{shape->layers,
                           shape->hidden,
                           shape->heads,
                           shape->kv_heads,
                           shape->head_size,
                           shape->inner,
                           shape->vocab,
                           shape->most_tokens,
                           shape->epsilon,
                           (CacheType)shape->cache,
                           (WeightFormat)shape->format,
                           (WeightFormat)shape->head_format};
  try {
    return new Decoder(given, shape->threads);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

void trivet_decoder_destroy(void* decoder) { delete static_cast<Decoder*>(decoder); }

// Rows [first, first + count) of a layer's weight, or of the head for layer -1, out of float32 or bfloat16 rows.
void trivet_decoder_fill(void* decoder, int64_t layer, int32_t part, const void* rows, int32_t is_bfloat16,
                         int64_t first, int64_t count) {
  Decoder& one = *static_cast<Decoder*>(decoder);
  PackedWeight& weight = layer < 0 ? one.head() : one.weight(layer, (LayerPart)part);
  if (is_bfloat16) {
    pack_bf16(weight, static_cast<const uint16_t*>(rows), first, first + count);
  } else {
    pack_f32(weight, static_cast<const float*>(rows), first, first + count);
  }
}

// The next rows of a layer's mixed weight, `count` of them in a block format of their own. 0 when that cannot be.
int32_t trivet_decoder_add_rows(void* decoder, int64_t layer, int32_t part, int32_t format, int64_t count) {
  try {
    static_cast<Decoder*>(decoder)->weight(layer, (LayerPart)part).add_rows((WeightFormat)format, count);
  } catch (const std::exception&) {
    return 0;
  }
  return 1;
}

// The same out of GGUF blocks of a kind (WeightFormat).
void trivet_decoder_fill_blocks(void* decoder, int64_t layer, int32_t part, int32_t kind, const void* rows,
                                int64_t first, int64_t count) {
  Decoder& one = *static_cast<Decoder*>(decoder);
  pack_blocks(layer < 0 ? one.head() : one.weight(layer, (LayerPart)part), (WeightFormat)kind,
              static_cast<const uint8_t*>(rows), first, first + count);
}

// Where a norm's weight (layer -1: the final norm) or a part's bias is written, float32.
float* trivet_decoder_norm(void* decoder, int64_t layer, int32_t part) {
  Decoder& one = *static_cast<Decoder*>(decoder);
  return layer < 0 ? one.final_norm() : one.norm(layer, (LayerPart)part);
}

float* trivet_decoder_bias(void* decoder, int64_t layer, int32_t part) {
  return static_cast<Decoder*>(decoder)->bias(layer, (LayerPart)part);
}

// Where an embedding that is not the head is written: [vocab, hidden] in the cache's type.
void* trivet_decoder_embedding(void* decoder) { return static_cast<Decoder*>(decoder)->embedding(); }

void trivet_decoder_run(void* decoder, const DecoderStep* step) { static_cast<Decoder*>(decoder)->run(*step); }

// Tokens that a layer's queries see at most, their own included; 0: all.
void trivet_decoder_window(void* decoder, int64_t layer, int64_t window) {
  static_cast<Decoder*>(decoder)->use_window(layer, window);
}

// Of the last step: chunks of 256 positions read once for several sequences, counted for each but one.
int64_t trivet_decoder_chunks_saved(void* decoder) { return static_cast<Decoder*>(decoder)->chunks_saved(); }

void trivet_decoder_logits(void* decoder, const float* normed, int64_t rows, float* logits) {
  static_cast<Decoder*>(decoder)->logits(normed, rows, logits);
}

// Null when there is not enough memory.
void* trivet_sampler_create(int64_t vocab, int32_t threads) {
  try {
    return new Sampler(vocab, threads);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

void trivet_sampler_destroy(void* sampler) { delete static_cast<Sampler*>(sampler); }

void trivet_sampler_run(void* sampler, const SamplingBatch* batch) { static_cast<Sampler*>(sampler)->sample(*batch); }

void trivet_sampler_pick(void* sampler, const LogprobRequest* request) {
  static_cast<Sampler*>(sampler)->pick(*request);
}

// For tests: decoders made from here on use this level, such as "avx2". 0 when the processor does not have it.
int32_t trivet_use_isa(const char* name) {
  for (Isa isa : {Isa::plain, Isa::avx2, Isa::avx512, Isa::amx}) {
    if (std::strcmp(name, isa_name(isa)) == 0 && isa <= cpu_features().best) {
      use_isa(isa);
      return 1;
    }
  }
  return 0;
}

// The instruction set in use, such as "amx".
const char* trivet_isa() { return isa_name(isa_in_use()); }
}
