#include "linear.h"

namespace trivet {
namespace {

// Some microseconds of a stream of weights; of a third of that, taking an item was measured to cost 5 % of it.
constexpr int64_t ITEM_BYTES = 96 << 10;
// With many rows a panel takes longer, but the next one can be asked for ahead only within an item.
constexpr int64_t ITEM_PANELS = 4;

int64_t divide_up(int64_t value, int64_t divisor) { return (value + divisor - 1) / divisor; }

}  // namespace

Shares::Shares(int64_t panels, int64_t least, int members) : panels(panels) {
  const int64_t each = std::max<int64_t>(1, panels / members / least);
  count = std::min<int64_t>(each * members, MOST_RACED / members * members);
}

Input::Input(WeightFormat format, int64_t rows, int64_t k, int members) : shared(format, rows, k) {
  for (int member = 0; member < members; ++member) {
    own.emplace_back(format, std::min(rows, ALONE_ROWS), k);
  }
}

int64_t least_panels(const PackedWeight& weight, int64_t rows) {
  return std::max(divide_up(ITEM_BYTES, weight.panel_bytes), rows > ALONE_ROWS ? ITEM_PANELS : 1);
}

}  // namespace trivet
