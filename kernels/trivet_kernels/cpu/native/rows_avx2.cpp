// The work on rows for AVX2.
#include "rows_kernels.h"

namespace trivet {

const RowKernels& row_kernels_avx2() { return KERNELS; }

}  // namespace trivet
