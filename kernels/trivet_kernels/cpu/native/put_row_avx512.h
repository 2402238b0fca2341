// Where the 32 finished columns of a row go: stored or added to the output.
#pragma once

#include <immintrin.h>

#include "matmul_kernels.h"

namespace trivet {

static inline void put_row(const MatmulTask& task, __m512 low, __m512 high, int64_t row, int64_t panel) {
  const int64_t columns = task.columns(panel);
  const uint32_t mask = columns == 32 ? ~0u : (1u << columns) - 1;
  const auto low_mask = static_cast<__mmask16>(mask), high_mask = static_cast<__mmask16>(mask >> 16);
  float* out = task.out_at(row, panel);
  if (task.output == Output::add) {
    low = _mm512_add_ps(_mm512_maskz_loadu_ps(low_mask, out), low);
    high = _mm512_add_ps(_mm512_maskz_loadu_ps(high_mask, out + 16), high);
  }
  _mm512_mask_storeu_ps(out, low_mask, low);
  _mm512_mask_storeu_ps(out + 16, high_mask, high);
}

}  // namespace trivet
