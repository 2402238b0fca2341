// A team of threads that works through one step together.
//
// The caller is member 0; the others sleep between steps and spin within one, where waking a sleeper at each of some
// two hundred meeting points would cost more than the work between them. The team owns its threads and nothing else.
// One caller at a time.
//
// Every member goes through the same phases. The things to do in a phase are shared out beforehand, so that a member
// reads its part of the weights as one stream, but a member that is through takes from those that are not, and a
// phase is over when everything in it is done, wherever its members are: one that has lost its processor finds the
// phases that passed meanwhile over, and goes on to the one that is open. What it was at when it lost it is waited for
// in `each`, and done by another in `race`.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace trivet {

class Team;

// What a member of a running team knows: who it is, and how to share work with the others.
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

  // A phase: work(0) ... work(count - 1), each called once, by whichever member. Returns when all are done; what they
  // wrote is seen after.
  template <typename Work>
  void each(int64_t count, Work work) {
    open(count);
    for (int64_t item = claim(); item >= 0; item = claim()) {
      work(item);
      finish();
    }
    await();
  }

  // A phase whose things may be done twice: `compute(item)` writes to this member's own memory only, and may read what
  // is no longer so when it comes too late; `publish(item)` is called once an item, soon after a compute of the same
  // member that was in time, and is short. At most MOST_RACED items.
  template <typename Compute, typename Publish>
  void race(int64_t count, Compute compute, Publish publish) {
    const auto began = Clock::now();
    open(count);
    int64_t computed = 0;
    for (int64_t item = claim(); item >= 0; item = claim()) {
      compute(item);
      ++computed;
      if (wins(item)) {
        publish(item);
        finish();
      }
    }
    if (!await_for(computed == 0 ? PATIENCE : 2 * (Clock::now() - began) / computed)) {
      for (int64_t item = 0; item < count; ++item) {
        if (is_published(item)) continue;
        compute(item);
        if (wins(item)) {
          publish(item);
          finish();
        }
      }
    }
    await();
  }

 private:
  using Clock = std::chrono::steady_clock;
  // How long one waits that has nothing to go by: longer than a member that runs takes for one item.
  static constexpr Clock::duration PATIENCE = std::chrono::microseconds(20);

  void open(int64_t count);
  int64_t claim();
  void finish();
  bool wins(int64_t item);
  bool is_published(int64_t item) const;
  bool is_over() const;
  bool await_for(Clock::duration patience) const;
  void await();

  Team& team_;
  int index_;
  bool sense_ = false;
  uint32_t phase_ = 0;  // of this step
  int64_t count_ = 0;   // things in it
  int64_t before_ = 0;  // things in the phases before it
};

constexpr int64_t MOST_RACED = 16384;

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

  // What is left of a member's share of a phase, and how much it has done, on a cache line that is mostly its own.
  struct alignas(64) Desk {
    std::atomic<uint64_t> left{0};  // phase, first and end: 24, 20 and 20 bits
    std::atomic<int64_t> done{0};   // in this step
  };

  int size_;
  std::vector<std::thread> threads_;
  std::mutex mutex_;
  std::condition_variable wake_;
  uint64_t round_ = 0;
  bool ends_ = false;
  Work work_ = nullptr;
  void* context_ = nullptr;
  std::unique_ptr<Desk[]> desks_;
  std::unique_ptr<std::atomic<uint64_t>[]> published_;  // round and phase in which an item was last published
  // Each on a cache line of its own: members that wait read `sense_` over and over.
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<bool> sense_{false};
  alignas(64) std::atomic<int64_t> next_{0};
  alignas(64) std::atomic<int> done_{0};
};

}  // namespace trivet
