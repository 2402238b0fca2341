// Paged attention for any processor.
#include "attention_vectors.h"

namespace trivet {

const AttentionKernels& attention_plain_bfloat16(bool is_int8) {
  return kernels_of<VectorEngine<Bfloat16Pairs>>(is_int8);
}
const AttentionKernels& attention_plain_float32(bool is_int8) {
  return kernels_of<VectorEngine<SingleFloats>>(is_int8);
}

}  // namespace trivet
