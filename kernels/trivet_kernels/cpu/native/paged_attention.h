// The attention of a whole step: which tasks there are, and who does what.
//
// A step's attention is planned once and carried out in every layer that has the same window. What is planned: rows are
// put into tasks; long ranges of positions are split so that every member of the team has work; sequences whose block
// tables begin with the same blocks attend to those together, so that shared keys and values are read once. None of it
// changes a bit of the result (see attention.h). It owns plans and buffers; queries, caches and outputs are the
// caller's.
#pragma once

#include <cstdint>
#include <vector>

#include "aligned_buffer.h"
#include "attention.h"
#include "team.h"

namespace trivet {

struct AttentionShape {
  CacheType type;
  int64_t heads, kv_heads, head_size;
  float scale;
  float soft_cap;  // 0: none
};

// The sequences of a step; the arrays are the caller's, and stay until the step is done.
struct PagedStep {
  int64_t sequences;
  const int64_t* query_starts;  // [sequences + 1]
  const int64_t* lengths;       // [sequences]: tokens whose keys are in the cache, this step's included
  const int32_t* block_table;   // [sequences][table_stride]
  int64_t table_stride;
  int64_t block_size;
};

// What one run reads and writes, [tokens][heads][head_size], tokens so many elements apart.
struct AttentionStates {
  const void* query;  // in the type that multiplies
  int64_t query_stride;
  void* output;
  int64_t output_stride;
  bool is_output_bfloat16;
};

class PagedAttention {
 public:
  PagedAttention(const AttentionShape& shape, int members);

  // By the caller alone, before the team runs. Window 0: none.
  void plan(const PagedStep& step, int64_t window, bool shares_prefixes);

  // By every member: a phase in which all tasks are done.
  void run(Member& member, const void* cache, const AttentionStates& states);

  // After that, the row of a token whose positions were split, [heads][head_size]; false for others, which `run` has
  // put into their places.
  bool merge(int64_t token, void* output, bool is_bfloat16 = false) const;

  // Chunks of 256 positions that the last plan reads once for several sequences, counted for each sequence but one.
  int64_t chunks_saved() const { return chunks_saved_; }

 private:
  struct Span {  // consecutive tokens of one sequence
    int64_t sequence, token, count;
  };
  struct Task {
    int64_t kv_head, first_span, spans, rows, first_chunk, last_chunk;
    bool is_partial;
    int64_t cost() const;
  };
  struct Token {
    int64_t position;
    int64_t partials = -1;  // where its partials begin, [heads][chunks]; -1: it has none
    int64_t first_chunk = 0, chunks = 0;
  };

  bool share_same_blocks(int64_t one, int64_t other, int64_t chunk) const;
  void share(const std::vector<int64_t>& members, int64_t first_chunk, int64_t chunk);
  void add_shared(const std::vector<int64_t>& members, int64_t first_chunk, int64_t last_chunk);
  void add_own(int64_t sequence);
  void keep_partials(const Span& span, int64_t first_chunk, int64_t last_chunk);
  void add_task(const std::vector<Span>& spans, int64_t first_chunk, int64_t last_chunk, bool is_partial);
  void deal_out();
  SeenPositions seen_by(const Task& task) const;
  void carry_out(int64_t number, const void* cache, const AttentionStates& states, void* scratch);

  AttentionShape shape_;
  const AttentionKernels& kernels_;
  int members_;
  std::vector<AlignedBuffer> scratch_;  // one per member
  AlignedBuffer partials_;
  PagedStep step_{};
  int64_t window_ = 0, chunks_saved_ = 0, partial_count_ = 0;
  int64_t target_ = 1;  // cost of a task above which it is split
  std::vector<Token> tokens_;
  std::vector<int64_t> shared_;  // chunks at the front of each sequence that it reads together with others
  std::vector<Span> spans_;
  std::vector<Task> tasks_;
};

}  // namespace trivet
