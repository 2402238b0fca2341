// The work on rows for AVX-512.
#include "rows_kernels.h"

namespace trivet {

const RowKernels& row_kernels_avx512() { return KERNELS; }

}  // namespace trivet
