// Sampling of rows for AVX2.
#include "sampling_kernels.h"

namespace trivet {

const SamplingKernels& sampling_kernels_avx2() { return KERNELS; }

}  // namespace trivet
