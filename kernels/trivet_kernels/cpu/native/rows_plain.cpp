// The work on rows for any processor.
#include "rows_kernels.h"

namespace trivet {

const RowKernels& row_kernels_plain() { return KERNELS; }

}  // namespace trivet
