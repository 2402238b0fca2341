// Paged attention of one task: some query rows over a range of the positions of one key/value head.
//
// Cache layout, per block and key/value head: sub-blocks of 16 tokens, each its keys then its values, in the type that
// multiplies. bfloat16: keys [D / 2][16][2] (pairs of dimensions of 16 tokens), values [8][D][2] (pairs of tokens);
// float32: keys [D][16], values [16][D]. Both are what a matrix product wants as its right side, so nothing is
// rearranged when read. int8: 16 scales of keys and 16 of values in float32, then the cells in the order of the type
// that multiplies; a cell times its token's scale is the value. Beside bfloat16 the two halves of every 64 cells take
// turns by eights, as they lie in a register that interleaves bytes.
//
// A row's result has the same bits whatever else is in the task, however the tokens came (prefilled, in chunks,
// decoded), and however positions are split between tasks: positions are walked in fixed chunks, within a chunk in one
// order, chunks are merged in order, and what a row does not see adds exact zeros.
#pragma once

#include <cstdint>

namespace trivet {

constexpr int64_t SUB_BLOCK = 16;         // tokens
constexpr int64_t ATTENTION_CHUNK = 256;  // tokens between two merges of partial results; part of the arithmetic
constexpr int64_t SCORE_STRIDE = ATTENTION_CHUNK + 16;  // floats between rows of scores: not all in the same sets of a cache
constexpr int64_t MOST_ROWS = 128;        // of one task, a multiple of 32

constexpr int64_t ROWS_TOGETHER = 32;  // that go through a chunk together
constexpr int64_t MOST_HEAD_SIZE = 512;

// Of the cache. The type that multiplies, and that queries have, is float32 or bfloat16; int8 has a layout for each.
enum class CacheType : int32_t { float32, bfloat16, int8_float32, int8_bfloat16 };

static inline bool is_int8(CacheType type) { return type >= CacheType::int8_float32; }
static inline bool multiplies_float32(CacheType type) {
  return type == CacheType::float32 || type == CacheType::int8_float32;
}
static inline int64_t query_cell_bytes(CacheType type) { return multiplies_float32(type) ? 4 : 2; }
// Of one sub-block of one key/value head; a block of one head has block_size / 16 of them.
static inline int64_t sub_block_bytes(CacheType type, int64_t head_size) {
  return is_int8(type) ? SUB_BLOCK * (2 * head_size + 8) : SUB_BLOCK * 2 * head_size * query_cell_bytes(type);
}

// Where a cell of int8 lies that is multiplied in bfloat16.
static inline int64_t int8_place(int64_t index) {
  return index / 64 * 64 + index % 32 / 8 * 16 + index / 32 % 2 * 8 + index % 8;
}

struct AttentionRow {
  const void* query;  // [D], in the type that multiplies
  void* output;       // [D] float or bfloat16; of a partial task: the partials, from the task's first chunk on
  int64_t position;   // it sees positions up to here
};

// What a task reads of the cache.
struct SeenPositions {
  const int32_t* blocks;  // block table that all rows share over these chunks
  int64_t kv_head;
  int64_t first_chunk, last_chunk;  // chunks [first, last)
  int64_t begin, end;               // some row sees these
};

struct AttentionTask {
  const AttentionRow* rows;
  int64_t count;      // of rows, at most MOST_ROWS
  const void* cache;  // of the layer
  SeenPositions seen;
  const SeenPositions* next;  // of the task that probably comes after this one; null: none
  int64_t block_size;         // tokens, a multiple of 16
  int64_t kv_heads;
  int64_t head_size;  // a multiple of 32
  int64_t window;     // tokens that a query sees at most, its own included; 0: all
  float scale;
  float soft_cap;  // scores are cap · tanh(score / cap); 0: none
  bool is_partial;
  bool is_output_bfloat16;
};

// One chunk of one row: the unnormalised sum [D], then the greatest score and the sum of weights. In floats, on whole
// lines.
static inline int64_t partial_stride(int64_t head_size) { return head_size + 16; }

struct AttentionKernels {
  void (*attend)(const AttentionTask&, void* scratch);
  // Merges the partials of one row, [chunks][partial_stride], in order.
  void (*fold)(const float* partials, int64_t chunks, int64_t head_size, void* output, bool is_output_bfloat16);
};

// Memory of one member, allocated once: so many zeroed bytes, aligned to 64. It serves one head size.
int64_t attention_scratch_bytes(int64_t head_size);

// The best ones for this machine.
const AttentionKernels& attention_kernels(CacheType);

const AttentionKernels& attention_amx_bfloat16(bool is_int8);
const AttentionKernels& attention_avx512_bfloat16(bool is_int8);
const AttentionKernels& attention_avx512_float32(bool is_int8);
const AttentionKernels& attention_avx2_bfloat16(bool is_int8);
const AttentionKernels& attention_avx2_float32(bool is_int8);
const AttentionKernels& attention_plain_bfloat16(bool is_int8);
const AttentionKernels& attention_plain_float32(bool is_int8);

}  // namespace trivet
