#include "sampling.h"

#include <vector>

#include "aligned_buffer.h"
#include "isa.h"
#include "team.h"

namespace trivet {

namespace {

// Rows from which waking the team costs less than it saves: a greedy row is some ten microseconds, a random one fifty.
constexpr int64_t ROWS_FOR_A_TEAM = 4;

}  // namespace

const SamplingKernels& sampling_kernels() {
#if defined(__x86_64__)
  const Isa isa = isa_in_use();
  if (isa >= Isa::avx512) return sampling_kernels_avx512();
  if (isa == Isa::avx2) return sampling_kernels_avx2();
#endif
  return sampling_kernels_plain();
}

struct Sampler::State {
  const SamplingKernels& kernels;
  Team team;
  std::vector<AlignedBuffer> masses, keys, marks;
  const SamplingBatch* batch = nullptr;
  const LogprobRequest* request = nullptr;
  std::vector<int64_t> entries, wanted;  // where a row's entries and wanted ids begin

  State(int64_t vocab, int threads) : kernels(sampling_kernels()), team(threads) {
    for (int member = 0; member < threads; ++member) {
      masses.emplace_back(vocab * 4);
      keys.emplace_back(vocab * 8);
      marks.emplace_back(vocab * 4);
    }
  }

  SamplingScratch scratch(int member) {
    return {masses[member].as<float>(), keys[member].as<uint64_t>(), marks[member].as<int32_t>()};
  }

  void sample_row(int64_t row, int member) { kernels.sample_row(*batch, row, scratch(member)); }

  void pick_row(int64_t row, int member) {
    kernels.pick_row(*request, row, request->wanted + wanted[row], entries[row], scratch(member));
  }

  template <void (State::*WORK)(int64_t, int)>
  void over(int64_t rows) {
    if (rows < ROWS_FOR_A_TEAM || team.size() == 1) {
      for (int64_t row = 0; row < rows; ++row) (this->*WORK)(row, 0);
      return;
    }
    struct Context {
      State* state;
      int64_t rows;
    } context{this, rows};
    team.run(
        [](void* given, Member& member) {
          const Context& one = *static_cast<Context*>(given);
          for (int64_t row = member.next(one.rows); row >= 0; row = member.next(one.rows)) {
            (one.state->*WORK)(row, member.index());
          }
        },
        &context);
  }
};

Sampler::Sampler(int64_t vocab, int threads) : state_(new State(vocab, threads)) {}
Sampler::~Sampler() = default;

void Sampler::sample(const SamplingBatch& batch) {
  state_->batch = &batch;
  state_->over<&State::sample_row>(batch.rows);
}

void Sampler::pick(const LogprobRequest& request) {
  State& state = *state_;
  state.request = &request;
  state.entries.assign(request.rows, 0);
  state.wanted.assign(request.rows, 0);
  int64_t entry = 0, wanted = 0;
  for (int64_t row = 0; row < request.rows; ++row) {
    state.entries[row] = entry;
    state.wanted[row] = wanted;
    entry += request.widths[row] + 1;
    wanted += request.is_wanted[row] ? request.widths[row] : 0;
  }
  state.over<&State::pick_row>(request.rows);
}

}  // namespace trivet
