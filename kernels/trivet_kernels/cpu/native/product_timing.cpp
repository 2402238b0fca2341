#include "product_timing.h"

#include <algorithm>
#include <chrono>
#include <new>
#include <vector>

#include "linear.h"
#include "team.h"

namespace trivet {
namespace {

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

PackedWeight pack(const TimedProduct& product) {
  PackedWeight weight(product.format, product.n, product.k);
  switch (product.kind) {
    case SourceKind::f32:
      pack_f32(weight, static_cast<const float*>(product.rows), 0, product.n);
      break;
    case SourceKind::bf16:
      pack_bf16(weight, static_cast<const uint16_t*>(product.rows), 0, product.n);
      break;
    case SourceKind::blocks:
      pack_blocks(weight, weight.format, static_cast<const uint8_t*>(product.rows), 0, product.n);
      break;
  }
  return weight;
}

struct Bench {
  Bench(const TimedProduct& product, int threads)
      : rows(product.x_rows),
        stride(product.n),
        x(rows * product.k),
        out(rows * product.n),
        input(product.format, (rows + row_block - 1) / row_block * row_block, product.k, threads) {
    for (int64_t copy = 0; copy < product.copies; ++copy) weights.push_back(pack(product));
    const Shares shares(weights[0].panels, least_panels(weights[0], rows), threads);
    for (int member = 0; member < threads; ++member) {
      desks.push_back({AlignedBuffer(product.k * 4), AlignedBuffer(std::min(rows, RACED_ROWS) * shares.most() *
                                                                   panel_columns * (int64_t)sizeof(float))});
    }
    uint32_t state = 1;
    for (float& value : x) {
      state = state * 1664525 + 1013904223;
      value = static_cast<float>(state >> 8) / (1 << 23) - 1.0f;
    }
  }

  void multiply_all(Member& member) {
    for (const PackedWeight& weight : weights) {
      auto prepare_row = [&](Activations& into, int64_t row) { prepare(into, x.data(), weight.k, row, row + 1); };
      prepare_shared(member, input, rows, prepare_row);
      multiply(member, weight, {}, input, rows, out.data(), stride, Output::store, desks[member.index()], prepare_row);
    }
  }

  int64_t rows, stride;
  std::vector<float> x, out;
  Input input;
  std::vector<PackedWeight> weights;
  std::vector<Desk> desks;
};

}  // namespace

int64_t time_matmul(int threads, const TimedProduct& product, int64_t rounds, double* seconds) {
  try {
    Bench bench(product, threads);
    Team team(threads);
    for (int64_t round = -1; round < rounds; ++round) {  // the first warms up
      const double began = now();
      team.run([](void* given, Member& member) { static_cast<Bench*>(given)->multiply_all(member); }, &bench);
      if (round >= 0) seconds[round] = now() - began;
    }
    return product.copies * bench.weights[0].data.bytes();
  } catch (const std::bad_alloc&) {
    return 0;
  }
}

}  // namespace trivet
