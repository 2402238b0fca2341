#include "team.h"

#include <sched.h>

#include <cassert>

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

// What is left of a share, in one word: phase, first and end.
constexpr int PLACE_BITS = 20;
constexpr uint64_t PLACE = (uint64_t{1} << PLACE_BITS) - 1;

uint64_t pack(uint32_t phase, uint64_t first, uint64_t end) {
  return uint64_t{phase} << 2 * PLACE_BITS | first << PLACE_BITS | end;
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

void Member::open(int64_t count) {
  ++phase_;
  before_ += count_;
  count_ = count;
  assert(count <= (int64_t)PLACE && phase_ < 1u << (64 - 2 * PLACE_BITS));
}

// From the front of one's own share; then from the back of the others'. A share that nobody has touched in this phase
// is laid out by whoever comes first, and one that belongs to a later phase says that this one is over.
int64_t Member::claim() {
  for (int distance = 0; distance < team_.size_; ++distance) {
    const int owner = (index_ + distance) % team_.size_;
    std::atomic<uint64_t>& left = team_.desks_[owner].left;
    uint64_t word = left.load(std::memory_order_acquire);
    for (;;) {
      const uint32_t phase = (uint32_t)(word >> 2 * PLACE_BITS);
      if (phase > phase_) return -1;
      uint64_t first = word >> PLACE_BITS & PLACE, end = word & PLACE;
      if (phase < phase_) {
        first = count_ * owner / team_.size_;
        end = count_ * (owner + 1) / team_.size_;
      }
      if (first == end) break;
      const bool own = distance == 0;
      if (left.compare_exchange_weak(word, own ? pack(phase_, first + 1, end) : pack(phase_, first, end - 1),
                                     std::memory_order_acq_rel, std::memory_order_acquire)) {
        return own ? first : end - 1;
      }
    }
  }
  return -1;
}

void Member::finish() {
  std::atomic<int64_t>& done = team_.desks_[index_].done;
  done.store(done.load(std::memory_order_relaxed) + 1, std::memory_order_release);
}

bool Member::wins(int64_t item) {
  std::atomic<uint64_t>& published = team_.published_[item];
  const uint64_t now = team_.round_ << 32 | phase_;
  uint64_t last = published.load(std::memory_order_acquire);
  while (last < now) {
    if (published.compare_exchange_weak(last, now, std::memory_order_acq_rel)) return true;
  }
  return false;
}

bool Member::is_published(int64_t item) const {
  return team_.published_[item].load(std::memory_order_acquire) >= (team_.round_ << 32 | phase_);
}

bool Member::is_over() const {
  int64_t done = 0;
  for (int index = 0; index < team_.size_; ++index) {
    done += team_.desks_[index].done.load(std::memory_order_acquire);
  }
  return done >= before_ + count_;
}

bool Member::await_for(Clock::duration patience) const {
  const auto end = Clock::now() + patience;
  while (!is_over()) {
    if (Clock::now() > end) return false;
    relax();
  }
  return true;
}

void Member::await() {
  spin_until([&] { return is_over(); });
}

Team::Team(int size) : size_(size), desks_(new Desk[size]), published_(new std::atomic<uint64_t>[MOST_RACED]) {
  for (int64_t item = 0; item < MOST_RACED; ++item) {
    published_[item].store(0, std::memory_order_relaxed);
  }
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
  for (int index = 0; index < size_; ++index) {
    desks_[index].left.store(0, std::memory_order_relaxed);
    desks_[index].done.store(0, std::memory_order_relaxed);
  }
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
