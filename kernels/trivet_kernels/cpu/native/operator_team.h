// The threads that single operators share, one team for the whole process, and what they keep from call to call.
//
// Whoever runs an operator holds the lock: one at a time. Small work stays on the caller's thread, where waking others
// would cost more than it does.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "matmul.h"
#include "team.h"

namespace trivet {

class OperatorTeam {
 public:
  static OperatorTeam& shared();

  void use_threads(int count);

  // Every member runs `work(member)` once.
  template <typename Work>
  void run(const Work& work) {
    std::lock_guard<std::mutex> held(lock_);
    run_held(work);
  }

  // `prepare(number of members)` by the caller alone, then `work(member)` by all, with nobody else's work between.
  template <typename Prepare, typename Work>
  void run_after(const Prepare& prepare, const Work& work) {
    std::lock_guard<std::mutex> held(lock_);
    prepare(team_->size());
    run_held(work);
  }

  // `work(begin, end)` over ranges of `count` things of `values` numbers each.
  template <typename Work>
  void share_out(int64_t count, int64_t values, const Work& work) {
    if (count * values < SMALL) {
      work(int64_t{0}, count);
      return;
    }
    run([&](Member& member) {
      int64_t begin, end;
      member.share(count, begin, end);
      work(begin, end);
    });
  }

  // `work(activations, member)` with room for that many rows, which stays for the next call.
  template <typename Work>
  void run_with(WeightFormat format, int64_t rows, int64_t k, const Work& work) {
    std::lock_guard<std::mutex> held(lock_);
    Activations& kept = activations_[{format, k}];
    if (kept.capacity_rows < rows) kept = Activations(format, (rows + row_block - 1) / row_block * row_block, k);
    run_held([&](Member& member) { work(kept, member); });
  }

 private:
  static constexpr int64_t SMALL = 32 * 1024;

  OperatorTeam();

  template <typename Work>
  void run_held(const Work& work) {
    team_->run([](void* context, Member& member) { (*static_cast<const Work*>(context))(member); },
               const_cast<void*>(static_cast<const void*>(&work)));
  }

  std::mutex lock_;
  std::unique_ptr<Team> team_;
  std::map<std::pair<WeightFormat, int64_t>, Activations> activations_;
};

}  // namespace trivet
