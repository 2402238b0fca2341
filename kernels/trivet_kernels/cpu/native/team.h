// A team of threads that works through one step together.
//
// The caller is member 0; the others sleep between steps and spin within one, where waking a sleeper at each of some
// two hundred meeting points would cost more than the work between them. The team owns its threads and nothing else.
// One caller at a time.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace trivet {

class Team;

// What a member of a running team knows: who it is, and how to meet the others.
class Member {
 public:
  Member(Team& team, int index) : team_(team), index_(index) {}

  int index() const { return index_; }
  int size() const;

  // Returns when every member has come here; what they wrote before is seen after.
  void meet();

  // This member's share of `count` things, as a range; shares differ by one at most and depend on nothing but the
  // numbers.
  void share(int64_t count, int64_t& begin, int64_t& end) const;

  // The next of `count` things to do, taken by whoever comes first; -1 when none is left. The counter starts anew after
  // `meet`.
  int64_t next(int64_t count);

 private:
  Team& team_;
  int index_;
  bool sense_ = false;
};

class Team {
 public:
  using Work = void (*)(void* context, Member& member);

  explicit Team(int size);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int size() const { return size_; }

  // Every member runs `work` once; returns when all are done.
  void run(Work work, void* context);

 private:
  friend class Member;
  void live(int index);

  int size_;
  std::vector<std::thread> threads_;
  std::mutex mutex_;
  std::condition_variable wake_;
  uint64_t round_ = 0;
  bool ends_ = false;
  Work work_ = nullptr;
  void* context_ = nullptr;
  // Each on a cache line of its own: members that wait read `sense_` over and over.
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<bool> sense_{false};
  alignas(64) std::atomic<int64_t> next_{0};
  alignas(64) std::atomic<int> done_{0};
};

}  // namespace trivet
