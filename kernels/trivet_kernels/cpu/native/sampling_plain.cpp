// Sampling of rows for plain machines.
#include "sampling_kernels.h"

namespace trivet {

const SamplingKernels& sampling_kernels_plain() { return KERNELS; }

}  // namespace trivet
