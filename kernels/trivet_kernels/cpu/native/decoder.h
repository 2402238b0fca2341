// A whole step of a Llama-type decoder: embedding, layers, final norm, logits of the rows that are sampled.
//
// One team of threads goes through all layers and meets between their parts; nothing is allocated and no interpreter is
// asked on the way. The residual stream and everything between products is float32, whatever the weights' format. The
// decoder owns weights and buffers; the KV cache belongs to the caller and has the layout of attention.h.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "attention.h"
#include "matmul.h"
#include "team.h"

namespace trivet {

struct DecoderShape {
  int64_t layers, hidden, heads, kv_heads, head_size, inner, vocab;
  int64_t most_tokens;  // of one step
  float epsilon;        // of the norms
  CacheType cache;      // its multiplying type is that of queries and embedding
  WeightFormat format, head_format;
};

// One step. Arrays are the caller's and are only read, but for the cache and `logits`.
struct DecoderStep {
  int64_t tokens;
  const int64_t* token_ids;  // [tokens]
  const int64_t* positions;  // [tokens]
  const int64_t* slots;      // [tokens]: block * block_size + offset; negative: the key and value are not kept
  int64_t sequences;
  const int64_t* query_starts;  // [sequences + 1]
  const int32_t* block_table;   // [sequences][table_stride]
  int64_t table_stride;
  int64_t block_size;
  int64_t shares_prefixes;  // 0: each sequence reads its keys and values alone; the bits are the same
  const float* cosines;     // [positions][head_size / 2]
  const float* sines;
  void* const* caches;          // one per layer; null: no attention (profiling)
  int64_t sampled;              // rows of which logits are wanted
  const int64_t* sampled_rows;  // [sampled]
  float* logits;                // [sampled][vocab]
  float* normed;                // [tokens][hidden] after the final norm, or null
};

enum class LayerPart { attention_norm, qkv, output, mlp_norm, gate_and_up, down };

class Decoder {
 public:
  Decoder(const DecoderShape& shape, int threads);
  ~Decoder();

  const DecoderShape& shape() const;
  // Where a layer's weights go; the norms are float32.
  PackedWeight& weight(int64_t layer, LayerPart part);
  float* bias(int64_t layer, LayerPart part);  // zeros until filled; marks the part as having one
  float* norm(int64_t layer, LayerPart part);
  float* final_norm();
  // Tokens that a layer's queries see at most, their own included; 0: all.
  void use_window(int64_t layer, int64_t window);
  PackedWeight& head();
  // The rows of the embedding, where it is not the head's own weight; bfloat16 or float32 as the cache.
  void* embedding();

  void run(const DecoderStep& step);
  // Of the last step: chunks of 256 positions read once for several sequences, counted for each but one.
  int64_t chunks_saved() const;

  // Logits [rows][vocab] of states after the final norm, [rows][hidden]; at most `most_tokens` rows.
  void logits(const float* normed, int64_t rows, float* logits);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace trivet
