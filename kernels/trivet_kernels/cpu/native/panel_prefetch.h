// A walk over the next panel, a few lines at each visit, so that it is in the L2 when its turn comes.
#pragma once

#include <immintrin.h>

#include "matmul_kernels.h"

namespace trivet {
namespace {  // each instruction set's file has its own copy

class PanelPrefetch {
 public:
  PanelPrefetch(const uint8_t* begin, int64_t bytes, int64_t visits)
      : line_(begin), end_(begin + bytes), lines_per_visit_((bytes / line_bytes + visits - 1) / visits) {}
  void visit() {
    for (int64_t i = 0; i < lines_per_visit_ && line_ < end_; ++i, line_ += line_bytes) {
      _mm_prefetch(reinterpret_cast<const char*>(line_), _MM_HINT_T1);
    }
  }

 private:
  const uint8_t* line_;
  const uint8_t* end_;
  int64_t lines_per_visit_;
};

}  // namespace
}  // namespace trivet
