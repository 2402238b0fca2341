#include "team.h"

#include <sched.h>

namespace trivet {

namespace {

// Some ten microseconds, longer than members that both run are apart. Then the other is off its processor, perhaps for
// milliseconds: ours goes to whoever wants it, maybe to the one that we wait for.
constexpr int SPINS_BEFORE_YIELD = 200;

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

template <typename Ready>
void spin_until(Ready ready) {
  for (int turns = 0; !ready(); ++turns) {
    if (turns < SPINS_BEFORE_YIELD) {
      relax();
    } else {
      sched_yield();
    }
  }
}

}  // namespace

int Member::size() const { return team_.size_; }

void Member::meet() {
  if (team_.size_ == 1) {
    team_.next_.store(0, std::memory_order_relaxed);
    return;
  }
  sense_ = !sense_;
  if (team_.arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == team_.size_) {
    team_.arrived_.store(0, std::memory_order_relaxed);
    team_.next_.store(0, std::memory_order_relaxed);
    team_.sense_.store(sense_, std::memory_order_release);
  } else {
    spin_until([&] { return team_.sense_.load(std::memory_order_acquire) == sense_; });
  }
}

void Member::share(int64_t count, int64_t& begin, int64_t& end) const {
  begin = count * index_ / team_.size_;
  end = count * (index_ + 1) / team_.size_;
}

int64_t Member::next(int64_t count) {
  const int64_t taken = team_.next_.fetch_add(1, std::memory_order_relaxed);
  return taken < count ? taken : -1;
}

Team::Team(int size) : size_(size) {
  for (int index = 1; index < size; ++index) {
    threads_.emplace_back([this, index] { live(index); });
  }
}

Team::~Team() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    ends_ = true;
  }
  wake_.notify_all();
  for (std::thread& thread : threads_) {
    thread.join();
  }
}

void Team::run(Work work, void* context) {
  arrived_.store(0, std::memory_order_relaxed);
  sense_.store(false, std::memory_order_relaxed);
  next_.store(0, std::memory_order_relaxed);
  done_.store(0, std::memory_order_relaxed);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    work_ = work;
    context_ = context;
    ++round_;
  }
  wake_.notify_all();
  Member caller(*this, 0);
  work(context, caller);
  spin_until([&] { return done_.load(std::memory_order_acquire) == size_ - 1; });
}

void Team::live(int index) {
  uint64_t seen = 0;
  for (;;) {
    Work work;
    void* context;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      wake_.wait(lock, [&] { return ends_ || round_ != seen; });
      if (ends_) {
        return;
      }
      seen = round_;
      work = work_;
      context = context_;
    }
    Member member(*this, index);
    work(context, member);
    done_.fetch_add(1, std::memory_order_release);
  }
}

}  // namespace trivet
