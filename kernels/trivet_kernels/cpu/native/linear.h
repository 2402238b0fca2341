// Products of a layer, shared out over a team: what a member multiplies, where it keeps what is only its own.
//
// Few rows: each member prepares all of them for itself, which is cheaper than to meet for it, and a product may be
// taken over by another member, since its results are published only when they are complete. More rows: each member
// prepares some, for all. The bits are the same, whoever does what.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "matmul.h"
#include "team.h"

namespace trivet {

constexpr int64_t ALONE_ROWS = 8;   // prepared by every member for itself
constexpr int64_t RACED_ROWS = 64;  // up to which a member takes over what another does not get done

// Columns of a weight in panels, as the items of a phase: every member has as many, and reads them one after the other.
struct Shares {
  // At least `least` panels an item, where there are enough.
  Shares(int64_t panels, int64_t least, int members);

  int64_t first(int64_t item) const { return panels * item / count; }
  int64_t most() const { return (panels + count - 1) / count; }  // panels of an item

  int64_t panels, count;
};

// The activations of one product: those that all members read, and each member's own.
struct Input {
  Input() = default;
  Input(WeightFormat format, int64_t rows, int64_t k, int members);

  Activations shared;
  std::vector<Activations> own;
};

// What only one member writes.
struct Desk {
  AlignedBuffer row;      // one row of the residual stream
  AlignedBuffer results;  // of one item, before they are published
};

// Panels an item should have: enough bytes that taking it costs nothing beside it, or enough columns.
int64_t least_panels(const PackedWeight& weight, int64_t rows);

// All rows of `input.shared` made by `prepare_row(activations, row)`, if they are too many for each member to do it.
template <typename PrepareRow>
void prepare_shared(Member& member, Input& input, int64_t rows, PrepareRow prepare_row) {
  if (rows > ALONE_ROWS) {
    member.each(rows, [&](int64_t row) { prepare_row(input.shared, row); });
  }
}

// The activations that a member multiplies within one phase.
template <typename PrepareRow>
class Prepared {
 public:
  Prepared(Member& member, Input& input, int64_t rows, PrepareRow prepare_row)
      : x_(rows > ALONE_ROWS ? input.shared : input.own[member.index()]),
        left_(rows > ALONE_ROWS ? 0 : rows),
        prepare_row_(prepare_row) {}

  const Activations& get() {
    for (; left_ > 0; --left_) {
      prepare_row_(x_, left_ - 1);
    }
    return x_;
  }

 private:
  Activations& x_;
  int64_t left_;  // rows to be prepared yet
  PrepareRow prepare_row_;
};

// out = rows of x · weightᵀ + bias, or added to what is there; empty: no bias. Only up to ALONE_ROWS rows are prepared
// here, by `prepare_row(activations, row)`.
template <typename PrepareRow>
void multiply(Member& member, const PackedWeight& weight, const std::vector<float>& bias, Input& input, int64_t rows,
              float* out, int64_t stride, Output output, Desk& desk, PrepareRow prepare_row) {
  const Shares shares(weight.panels, least_panels(weight, rows), member.size());
  auto add_bias = [&](int64_t first, int64_t last) {
    const int64_t end = std::min(last * panel_columns, weight.n);
    for (int64_t row = 0; !bias.empty() && row < rows; ++row) {
      for (int64_t column = first * panel_columns; column < end; ++column) {
        out[row * stride + column] += bias[column];
      }
    }
  };
  if (rows > RACED_ROWS) {
    member.each(shares.count, [&](int64_t item) {
      const int64_t first = shares.first(item), last = shares.first(item + 1);
      matmul(weight, input.shared, {0, rows, first, last}, out, stride, output);
      add_bias(first, last);
    });
    return;
  }
  Prepared<PrepareRow> prepared(member, input, rows, prepare_row);
  float* results = desk.results.as<float>();
  member.race(
      shares.count,
      [&](int64_t item) {
        const int64_t first = shares.first(item), last = shares.first(item + 1);
        matmul(weight, prepared.get(), {0, rows, first, last}, results - first * panel_columns,
               (last - first) * panel_columns, Output::store);
      },
      [&](int64_t item) {
        const int64_t first = shares.first(item), last = shares.first(item + 1), width = (last - first) * panel_columns;
        const int64_t begin = first * panel_columns, columns = std::min(width, weight.n - begin);
        for (int64_t row = 0; row < rows; ++row) {
          const float* from = results + row * width;
          float* to = out + row * stride + begin;
          for (int64_t column = 0; column < columns; ++column) {
            to[column] = output == Output::add ? to[column] + from[column] : from[column];
          }
        }
        add_bias(first, last);
      });
}

}  // namespace trivet
