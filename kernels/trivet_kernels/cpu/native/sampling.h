// From logits to tokens, row by row: constraints, penalties, temperature, filters, noise; and log probabilities.
//
// What a row gives depends on its logits, its own parameters, its seed and its position: not on the other rows, nor on
// the number of threads, nor on the instruction set. The Python side (trivet_worker/sampling/plain.py) is the
// definition; the noise has its bits. Rows are shared among a team's members; no memory is allocated for a batch.
#pragma once

#include <cstdint>
#include <memory>

namespace trivet {

// The parts of the order that one call goes through; between them stand a caller's own processors.
enum SamplingPhase : int32_t {
  PHASE_CONSTRAIN = 1,  // allowed tokens, bad words, min tokens, bias
  PHASE_SCALE = 2,      // penalties, temperature, min-p
  PHASE_CHOOSE = 4,     // top-k, top-p, noise, argmax
};

enum RowFlag : uint8_t { ROW_FINE = 0, ROW_NON_FINITE = 1, ROW_ALL_MASKED = 2 };

// Rows of a step. Columns are indexed by `slots[row]`.
struct SamplingBatch {
  int64_t rows, vocab;
  float* logits;                  // [rows][vocab], changed in place
  const int64_t* slots;           // [rows]
  const int64_t* lengths;         // [rows] tokens so far: the position of the token to come
  const int64_t* prompt_lengths;  // [rows]
  const int32_t* token_ids;       // by slot: [token_stride]
  int64_t token_stride;
  const uint64_t* seeds;
  const float* temperature;  // 0: greedy
  const float* top_p;
  const int64_t* top_k;  // 0: all
  const float* min_p;
  const float* presence;
  const float* frequency;
  const float* repetition;
  const int32_t* min_tokens;
  const int32_t* const* constraints;  // null: none; else as `Constraints` in sampling_kernels.h reads it
  int64_t* tokens;                    // [rows], out
  uint8_t* flags;                     // [rows], out: set by the constrain phase, read by the others
  float* shifts;  // [rows], out of the scale phase: what a random row's scores lost before they were
                  // divided, divided too; 0 for a greedy row
  int32_t phases;
  int32_t keeps_filtered;  // what top-k and top-p drop becomes -inf in `logits`, for log probabilities of what is left
};

// Log probabilities (or the scores themselves) of chosen ids and of others.
struct LogprobRequest {
  int64_t rows, vocab;
  const float* scores;       // [rows][vocab]
  const int64_t* chosen;     // [rows]
  const int32_t* widths;     // [rows]: the most likely so many, or so many of `wanted`
  const int32_t* wanted;     // ragged ids of the rows whose `is_wanted` is set
  const uint8_t* is_wanted;  // [rows]
  const uint8_t* is_plain;   // [rows]: scores as they are, not normalised
  const float* shift;        // [rows]: added to plain scores
  int32_t* token_ids;        // ragged out: the chosen one, then `widths` others
  float* values;             // the same
  int32_t* ranks;            // [rows] of the chosen one, from 1
};

// A float that stands for an impossible token's log probability.
constexpr float LOGPROB_FLOOR = -9999.0f;

struct SamplingScratch {
  float* masses;   // [vocab]
  uint64_t* keys;  // [vocab]
  int32_t* marks;  // [vocab], zeros between calls
};

using SampleRow = void (*)(const SamplingBatch&, int64_t row, const SamplingScratch&);
using PickRow = void (*)(const LogprobRequest&, int64_t row, const int32_t* wanted, int64_t at, const SamplingScratch&);

struct SamplingKernels {
  SampleRow sample_row;
  PickRow pick_row;
};

const SamplingKernels& sampling_kernels();  // the best ones for this machine
const SamplingKernels& sampling_kernels_plain();
const SamplingKernels& sampling_kernels_avx2();
const SamplingKernels& sampling_kernels_avx512();

// Owns threads and their memory. One caller at a time.
class Sampler {
 public:
  Sampler(int64_t vocab, int threads);
  ~Sampler();
  void sample(const SamplingBatch& batch);
  void pick(const LogprobRequest& request);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace trivet
