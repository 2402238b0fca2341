// Attention over a paged cache as Python calls it, over the team of the process. Shapes and types are checked on the
// other side.
#include <map>
#include <tuple>

#include "isa.h"
#include "operator_team.h"
#include "paged_attention.h"

using namespace trivet;

extern "C" {

// One step's attention over one layer's cache, in the layout of attention.h. Query tokens of a sequence are its last;
// their keys and values are in the cache already. The caller checks that the block table covers every length.
struct TrivetAttention {
  const void*
      query;  // [tokens][heads][head_size], contiguous but for the stride of tokens; in the type that multiplies
  int64_t query_stride;         // elements between tokens
  void* output;                 // [tokens][heads][head_size], contiguous
  const void* cache;            // [blocks][kv_heads][block_size] tokens
  const int32_t* block_table;   // [sequences][table_stride]
  int64_t table_stride;         // blocks
  const int64_t* query_starts;  // [sequences + 1]
  const int64_t* lengths;  // [sequences]: tokens with keys in the cache, this step's included; 0: outputs are zeros
  int64_t sequences, block_size, heads, kv_heads, head_size;
  int64_t window;              // tokens that a query sees at most, its own included; 0: all
  int32_t cache_type;          // CacheType: 0 float32, 1 bfloat16, 2 int8 beside float32, 3 int8 beside bfloat16
  int32_t is_output_bfloat16;  // else float32
  int32_t shares_prefixes;     // 0: each sequence reads its keys and values alone; the bits are the same
  float scale;
  float soft_cap;  // scores are cap · tanh(score / cap); 0: none
};

// Gives how many chunks of 256 positions were read once for several sequences, counted for each but one.
int64_t trivet_paged_attention(const TrivetAttention* call) {
  using Key = std::tuple<CacheType, int64_t, int64_t, int64_t, float, float, Isa, int>;
  static std::map<Key, PagedAttention> kept;  // under the lock of the team
  const AttentionShape shape{
      (CacheType)call->cache_type, call->heads, call->kv_heads, call->head_size, call->scale, call->soft_cap};
  const PagedStep step{call->sequences,   call->query_starts, call->lengths,
                       call->block_table, call->table_stride, call->block_size};
  const AttentionStates states{call->query, call->query_stride, call->output, call->heads * call->head_size,
                               call->is_output_bfloat16 != 0};
  const int64_t row_bytes = call->heads * call->head_size * (states.is_output_bfloat16 ? 2 : 4);
  PagedAttention* attention = nullptr;
  OperatorTeam::shared().run_after(
      [&](int members) {
        const Key key{shape.type,  shape.heads,    shape.kv_heads, shape.head_size,
                      shape.scale, shape.soft_cap, isa_in_use(),   members};
        attention = &kept.try_emplace(key, shape, members).first->second;
        attention->plan(step, call->window, call->shares_prefixes != 0);
      },
      [&](Member& member) {
        attention->run(member, call->cache, states);
        member.each(step.query_starts[step.sequences], [&](int64_t token) {
          attention->merge(token, static_cast<char*>(call->output) + token * row_bytes, states.is_output_bfloat16);
        });
      });
  return attention->chunks_saved();
}
}
