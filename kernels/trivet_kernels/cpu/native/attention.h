// Paged attention of one task: some consecutive query tokens of one sequence, for the query heads that share a
// key/value head.
//
// Cache layout, per block and key/value head: sub-blocks of 16 tokens, each its keys then its values. bfloat16: keys [D
// / 2][16][2] (pairs of dimensions of 16 tokens), values [8][D][2] (pairs of tokens); float32: keys [D][16], values
// [16][D]. Both are what a matrix product wants as its right side, so nothing is rearranged when read.
//
// A row's result has the same bits whatever else is in the task and however the tokens came (prefilled, in chunks,
// decoded): positions are walked in fixed chunks, within a chunk in one order, and what lies behind a row adds exact
// zeros.
#pragma once

#include <cstdint>

namespace trivet {

constexpr int64_t SUB_BLOCK = 16;         // tokens
constexpr int64_t ATTENTION_CHUNK = 512;  // tokens between two merges of partial results; part of the arithmetic
constexpr int64_t MOST_ROWS = 128;        // of one task, a multiple of 16

struct AttentionTask {
  const void* query;     // [tokens][query_stride], heads of this group first; bfloat16 or float
  int64_t query_stride;  // elements between tokens
  float* output;         // [tokens][output_stride]
  int64_t output_stride;
  const void* cache;      // of the layer
  const int32_t* blocks;  // block table of the sequence
  int64_t block_size;     // tokens, a multiple of 16
  int64_t kv_heads;
  int64_t kv_head;
  int64_t group;           // query heads per key/value head
  int64_t head_size;       // a multiple of 32
  int64_t tokens;          // tokens * group <= MOST_ROWS
  int64_t first_position;  // of the first token: it sees positions 0 ... first_position
  float scale;
};

// Memory of one member, allocated once: scratch_bytes(head_size) of it, aligned to 64.
int64_t attention_scratch_bytes(int64_t head_size);

using Attend = void (*)(const AttentionTask&, void* scratch);

enum class CacheType { float32, bfloat16 };

// The best one for this machine.
Attend choose_attention(CacheType);

Attend attention_amx_bfloat16();  // null when the file was built without
Attend attention_avx512_bfloat16();
Attend attention_plain_bfloat16();
Attend attention_avx512_float32();
Attend attention_plain_float32();

}  // namespace trivet
