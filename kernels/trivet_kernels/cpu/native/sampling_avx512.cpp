// Sampling of rows for AVX-512.
#include "sampling_kernels.h"

namespace trivet {

const SamplingKernels& sampling_kernels_avx512() { return KERNELS; }

}  // namespace trivet
