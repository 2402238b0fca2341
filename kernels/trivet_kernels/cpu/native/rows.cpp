#include "rows.h"

#include "isa.h"

namespace trivet {

const RowKernels& row_kernels() {
#if defined(__x86_64__)
  const Isa isa = isa_in_use();
  if (isa >= Isa::avx512) return row_kernels_avx512();
  if (isa == Isa::avx2) return row_kernels_avx2();
#endif
  return row_kernels_plain();
}

}  // namespace trivet
