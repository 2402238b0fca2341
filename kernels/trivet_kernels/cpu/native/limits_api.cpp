// What Python calls to time: the machine's limits, and single products. Formats: LimitFormat, WeightFormat.
#include "limits.h"
#include "product_timing.h"

using namespace trivet;

extern "C" {

// 0 when there is not enough memory.
int32_t trivet_time_reads(int32_t threads, int64_t bytes_each, int64_t passes, int64_t rounds, double* seconds) {
  return time_reads(threads, bytes_each, passes, rounds, seconds);
}

double trivet_time_products(int32_t threads, int32_t format, int64_t turns, int64_t rounds, double* seconds) {
  return time_products(threads, (LimitFormat)format, turns, rounds, seconds);
}

void trivet_time_meetings(int32_t threads, int64_t meetings, int64_t rounds, double* seconds) {
  time_meetings(threads, meetings, rounds, seconds);
}

// Weights packed from rows [n][k] of float32 (0), bfloat16 (1) or the format's own blocks (2), so many copies of them.
int64_t trivet_time_matmul(int32_t threads, int32_t format, int64_t n, int64_t k, const void* rows, int32_t kind,
                           int64_t copies, int64_t x_rows, int64_t rounds, double* seconds) {
  const TimedProduct product{(WeightFormat)format, n, k, rows, (SourceKind)kind, copies, x_rows};
  return time_matmul(threads, product, rounds, seconds);
}
}
