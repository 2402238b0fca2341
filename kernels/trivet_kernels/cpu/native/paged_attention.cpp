#include "paged_attention.h"

#include <algorithm>
#include <limits>

namespace trivet {

namespace {

constexpr int64_t FEWEST_SHARING = 8;       // sequences that attend to a prefix together
constexpr int64_t MOST_SHARING_ROWS = 32;   // of one of them, per key/value head: more have enough work of their own
constexpr int64_t TASKS_PER_MEMBER = 6;     // so that members end at about the same time
constexpr int64_t ROWS_FOR_FREE = 24;       // reading keys and values takes as long as computing so many rows
constexpr int64_t MOST_PARTIALS = 1 << 16;  // of a sequence's tokens; beyond, there are rows enough to share

int64_t chunks_of(int64_t positions) { return (positions + ATTENTION_CHUNK - 1) / ATTENTION_CHUNK; }

int64_t cost_of(int64_t rows, int64_t chunks) { return chunks * (rows + ROWS_FOR_FREE); }

}  // namespace

PagedAttention::PagedAttention(const AttentionShape& shape, int members)
    : shape_(shape), kernels_(attention_kernels(shape.type)), members_(members) {
  for (int member = 0; member < members; ++member) {
    scratch_.emplace_back(attention_scratch_bytes(shape.head_size));
  }
}

int64_t PagedAttention::Task::cost() const { return cost_of(rows, last_chunk - first_chunk); }

bool PagedAttention::share_same_blocks(int64_t one, int64_t other, int64_t chunk) const {
  const int64_t first = chunk * ATTENTION_CHUNK / step_.block_size;
  const int64_t end = ((chunk + 1) * ATTENTION_CHUNK + step_.block_size - 1) / step_.block_size;
  const int32_t* table = step_.block_table;
  return std::equal(table + one * step_.table_stride + first, table + one * step_.table_stride + end,
                    table + other * step_.table_stride + first);
}

// `members` have the same blocks in [first_chunk, chunk), and nobody has a task for those yet.
void PagedAttention::share(const std::vector<int64_t>& members, int64_t first_chunk, int64_t chunk) {
  for (;; ++chunk) {
    const int64_t column = chunk * ATTENTION_CHUNK / step_.block_size;
    const auto first_block = [&](int64_t sequence) {
      return step_.block_table[sequence * step_.table_stride + column];
    };
    std::vector<int64_t> reaching;  // all of whose rows see the whole chunk
    for (int64_t sequence : members) {
      const int64_t tokens = step_.query_starts[sequence + 1] - step_.query_starts[sequence];
      if (step_.lengths[sequence] - tokens + 1 >= (chunk + 1) * ATTENTION_CHUNK) {
        reaching.push_back(sequence);
      }
    }
    std::stable_sort(reaching.begin(), reaching.end(),
                     [&](int64_t one, int64_t other) { return first_block(one) < first_block(other); });
    std::vector<std::vector<int64_t>> groups;
    for (int64_t sequence : reaching) {
      if (groups.empty() || !share_same_blocks(groups.back().front(), sequence, chunk)) {
        groups.emplace_back();
      }
      groups.back().push_back(sequence);
    }
    groups.erase(std::remove_if(groups.begin(), groups.end(),
                                [](const auto& group) { return (int64_t)group.size() < FEWEST_SHARING; }),
                 groups.end());
    if (groups.size() == 1 && groups.front().size() == members.size()) {
      continue;
    }
    if (chunk > first_chunk) {
      add_shared(members, first_chunk, chunk);
    }
    for (const std::vector<int64_t>& group : groups) {
      share(group, chunk, chunk + 1);
    }
    return;
  }
}

void PagedAttention::add_shared(const std::vector<int64_t>& members, int64_t first_chunk, int64_t last_chunk) {
  const int64_t group = shape_.heads / shape_.kv_heads;
  std::vector<Span> together;
  int64_t rows = 0;
  const auto put = [&] {
    if (!together.empty()) {
      add_task(together, first_chunk, last_chunk, true);
      chunks_saved_ += ((int64_t)together.size() - 1) * (last_chunk - first_chunk);
    }
    together.clear();
    rows = 0;
  };
  for (int64_t sequence : members) {
    const int64_t token = step_.query_starts[sequence], count = step_.query_starts[sequence + 1] - token;
    if (rows + count * group > MOST_ROWS) {
      put();
    }
    together.push_back({sequence, token, count});
    rows += count * group;
    shared_[sequence] = last_chunk;
  }
  put();
}

void PagedAttention::add_task(const std::vector<Span>& spans, int64_t first_chunk, int64_t last_chunk,
                              bool is_partial) {
  const int64_t first = (int64_t)spans_.size();
  int64_t rows = 0;
  for (const Span& span : spans) {
    spans_.push_back(span);
    rows += span.count * (shape_.heads / shape_.kv_heads);
  }
  // Pieces of equal length, as many as keep every member at work.
  const int64_t chunks = last_chunk - first_chunk;
  const int64_t pieces = is_partial ? std::min(chunks, (cost_of(rows, chunks) + target_ - 1) / target_) : 1;
  for (int64_t piece = 0; piece < pieces; ++piece) {
    for (int64_t kv_head = 0; kv_head < shape_.kv_heads; ++kv_head) {
      tasks_.push_back({kv_head, first, (int64_t)spans.size(), rows, first_chunk + chunks * piece / pieces,
                        first_chunk + chunks * (piece + 1) / pieces, is_partial});
    }
  }
}

void PagedAttention::keep_partials(const Span& span, int64_t first_chunk, int64_t last_chunk) {
  for (int64_t token = span.token; token < span.token + span.count; ++token) {
    tokens_[token].partials = partial_count_;
    tokens_[token].first_chunk = first_chunk;
    tokens_[token].chunks = last_chunk - first_chunk;
    partial_count_ += shape_.heads * tokens_[token].chunks;
  }
}

void PagedAttention::add_own(int64_t sequence) {
  const int64_t group = shape_.heads / shape_.kv_heads, most = std::max<int64_t>(1, MOST_ROWS / group);
  const int64_t begin = step_.query_starts[sequence], tokens = step_.query_starts[sequence + 1] - begin;
  if (shared_[sequence] > 0) {
    const Span span{sequence, begin, tokens};
    const int64_t chunks = chunks_of(step_.lengths[sequence]);
    keep_partials(span, 0, chunks);
    if (chunks > shared_[sequence]) {
      add_task({span}, shared_[sequence], chunks, true);
    }
    return;
  }
  for (int64_t end = tokens; end > 0; end -= most) {
    const int64_t first = std::max<int64_t>(0, end - most);
    const Span span{sequence, begin + first, end - first};
    const int64_t oldest = tokens_[span.token].position + 1 - window_;
    const int64_t first_chunk = window_ > 0 ? std::max<int64_t>(0, oldest) / ATTENTION_CHUNK : 0;
    const int64_t last_chunk = chunks_of(tokens_[begin + end - 1].position + 1), chunks = last_chunk - first_chunk;
    const bool is_split = members_ > 1 && chunks > 1 && cost_of(span.count * group, chunks) > target_ &&
                          span.count * shape_.heads * chunks <= MOST_PARTIALS;
    if (is_split) {
      keep_partials(span, first_chunk, last_chunk);
    }
    add_task({span}, first_chunk, last_chunk, is_split);
  }
}

void PagedAttention::plan(const PagedStep& step, int64_t window, bool shares_prefixes) {
  step_ = step;
  window_ = window;
  chunks_saved_ = partial_count_ = 0;
  spans_.clear();
  tasks_.clear();
  shared_.assign(step.sequences, 0);
  tokens_.assign(step.query_starts[step.sequences], {});
  const int64_t group = shape_.heads / shape_.kv_heads;
  std::vector<int64_t> candidates;
  int64_t whole = 0;
  for (int64_t sequence = 0; sequence < step.sequences; ++sequence) {
    const int64_t begin = step.query_starts[sequence], count = step.query_starts[sequence + 1] - begin;
    for (int64_t token = 0; token < count; ++token) {
      tokens_[begin + token].position = step.lengths[sequence] - count + token;
    }
    const int64_t seen = window > 0 ? std::min(step.lengths[sequence], window + count) : step.lengths[sequence];
    whole += cost_of(count * group, chunks_of(seen));
    if (count > 0 && count * group <= MOST_SHARING_ROWS) {
      candidates.push_back(sequence);
    }
  }
  target_ = whole * shape_.kv_heads / (members_ * TASKS_PER_MEMBER) + 1;
  if (shares_prefixes && window == 0 && (int64_t)candidates.size() >= FEWEST_SHARING) {
    share(candidates, 0, 0);
  }
  for (int64_t sequence = 0; sequence < step.sequences; ++sequence) {
    add_own(sequence);
  }
  deal_out();
  const int64_t bytes = partial_count_ * partial_stride(shape_.head_size) * (int64_t)sizeof(float);
  if (bytes > partials_.bytes()) {
    partials_ = AlignedBuffer(bytes + bytes / 2);
  }
}

// The longest first, so that nobody begins one when the others are done; dealt out in turn, since each member begins
// with a range of them.
void PagedAttention::deal_out() {
  std::stable_sort(tasks_.begin(), tasks_.end(),
                   [](const Task& one, const Task& other) { return one.cost() > other.cost(); });
  std::vector<Task> dealt;
  for (int member = 0; member < members_; ++member) {
    for (size_t index = members_ - 1 - member; index < tasks_.size(); index += members_) {
      dealt.push_back(tasks_[index]);
    }
  }
  tasks_.swap(dealt);
}

void PagedAttention::run(Member& member, const void* cache, const AttentionStates& states) {
  member.each((int64_t)tasks_.size(),
              [&](int64_t index) { carry_out(index, cache, states, scratch_[member.index()].as<void>()); });
}

SeenPositions PagedAttention::seen_by(const Task& task) const {
  int64_t oldest = std::numeric_limits<int64_t>::max(), newest = 0;
  for (int64_t index = task.first_span; index < task.first_span + task.spans; ++index) {
    oldest = std::min(oldest, tokens_[spans_[index].token].position);
    newest = std::max(newest, tokens_[spans_[index].token + spans_[index].count - 1].position);
  }
  return {step_.block_table + spans_[task.first_span].sequence * step_.table_stride,
          task.kv_head,
          task.first_chunk,
          task.last_chunk,
          window_ > 0 ? std::max<int64_t>(0, oldest + 1 - window_) : 0,
          newest + 1};
}

void PagedAttention::carry_out(int64_t number, const void* cache, const AttentionStates& states, void* scratch) {
  const Task& task = tasks_[number];
  const int64_t group = shape_.heads / shape_.kv_heads, size = shape_.head_size;
  const int64_t query_cell = query_cell_bytes(shape_.type), output_cell = states.is_output_bfloat16 ? 2 : 4;
  AttentionRow rows[MOST_ROWS];
  int64_t row = 0;
  for (int64_t index = task.first_span; index < task.first_span + task.spans; ++index) {
    for (int64_t token = spans_[index].token; token < spans_[index].token + spans_[index].count; ++token) {
      const Token& place = tokens_[token];
      for (int64_t head = task.kv_head * group; head < (task.kv_head + 1) * group; ++head) {
        rows[row].query =
            static_cast<const char*>(states.query) + (token * states.query_stride + head * size) * query_cell;
        rows[row].output =
            task.is_partial
                ? static_cast<void*>(partials_.as<float>() +
                                     (place.partials + head * place.chunks + task.first_chunk - place.first_chunk) *
                                         partial_stride(size))
                : static_cast<char*>(states.output) + (token * states.output_stride + head * size) * output_cell;
        rows[row++].position = place.position;
      }
    }
  }
  AttentionTask one{};
  one.rows = rows;
  one.count = row;
  one.cache = cache;
  one.seen = seen_by(task);
  SeenPositions next;
  if (number + 1 < (int64_t)tasks_.size()) {
    next = seen_by(tasks_[number + 1]);
    one.next = &next;
  }
  one.block_size = step_.block_size;
  one.kv_heads = shape_.kv_heads;
  one.head_size = size;
  one.window = window_;
  one.scale = shape_.scale;
  one.soft_cap = shape_.soft_cap;
  one.is_partial = task.is_partial;
  one.is_output_bfloat16 = states.is_output_bfloat16;
  kernels_.attend(one, scratch);
}

bool PagedAttention::merge(int64_t token, void* output, bool is_bfloat16) const {
  const Token& place = tokens_[token];
  if (place.partials < 0) {
    return false;
  }
  const int64_t size = shape_.head_size;
  for (int64_t head = 0; head < shape_.heads; ++head) {
    const float* partials = partials_.as<float>() + (place.partials + head * place.chunks) * partial_stride(size);
    kernels_.fold(partials, place.chunks, size, static_cast<char*>(output) + head * size * (is_bfloat16 ? 2 : 4),
                  is_bfloat16);
  }
  return true;
}

}  // namespace trivet
