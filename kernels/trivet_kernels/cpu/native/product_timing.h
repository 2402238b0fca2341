// A linear layer alone, timed as the decoder runs it: activations prepared, weights multiplied, by a whole team.
#pragma once

#include <cstdint>

#include "matmul.h"

namespace trivet {

enum class SourceKind { f32, bf16, blocks };  // of the rows that weights are packed from

struct TimedProduct {
  WeightFormat format;
  int64_t n, k;
  const void* rows;  // [n][k], or GGUF blocks of the format
  SourceKind kind;
  int64_t copies;  // so many weights, multiplied one after the other: a model's layers, which no cache holds
  int64_t x_rows;
};

// Writes the seconds of every round, in which all copies are multiplied once; returns the bytes that all copies take,
// or 0 when there is no memory for them.
int64_t time_matmul(int threads, const TimedProduct& product, int64_t rounds, double* seconds);

}  // namespace trivet
