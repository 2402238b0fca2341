// The team and the clock around the loops, and the loops that need no particular instructions.
#include "limits.h"

#include <atomic>
#include <chrono>
#include <vector>

#include "aligned_buffer.h"
#include "isa.h"
#include "team.h"

namespace trivet {
namespace {

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

int64_t read_plain(const uint8_t* from, int64_t bytes) {
  const auto* words = reinterpret_cast<const uint64_t*>(from);
  uint64_t sums[8] = {};
  for (int64_t i = 0; i < bytes / 8; i += 8) {
    for (int j = 0; j < 8; ++j) sums[j] ^= words[i + j];
  }
  for (int j = 1; j < 8; ++j) sums[0] ^= sums[j];
  return static_cast<int64_t>(sums[0]);
}

void products_plain(int64_t turns) {
  float sums[32], x[32], y = 0.7f;
  for (int j = 0; j < 32; ++j) sums[j] = 0.0f, x[j] = 0.3f + 0.01f * static_cast<float>(j);
  asm volatile("" : "+m"(x), "+m"(y));
  for (int64_t i = 0; i < turns; ++i) {
    for (int j = 0; j < 32; ++j) sums[j] += x[j] * y;
    asm volatile("" : "+m"(sums));
  }
}

#if defined(__x86_64__)
ReadLoop choose_read_loop() {
  switch (isa_in_use()) {
    case Isa::plain:
      return read_loop_plain();
    case Isa::avx2:
      return read_loop_avx2();
    default:
      return read_loop_avx512();
  }
}

ProductLoop choose_product_loop(LimitFormat format) {
  switch (isa_in_use()) {
    case Isa::plain:
      return product_loop_plain(format);
    case Isa::avx2:
      return product_loop_avx2(format);
    case Isa::amx: {
      const ProductLoop tiles = product_loop_amx(format);
      if (tiles.run != nullptr) return tiles;
      [[fallthrough]];
    }
    default:
      return product_loop_avx512(format, cpu_features().avx512_bf16, cpu_features().avx512_vnni);
  }
}
#else
ReadLoop choose_read_loop() { return read_loop_plain(); }
ProductLoop choose_product_loop(LimitFormat format) { return product_loop_plain(format); }
#endif

// Runs `work(member, round)` on every member, `rounds` times; a round lasts from one meeting to the next.
template <typename Work>
void time_rounds(int threads, int64_t rounds, double* seconds, const Work& work) {
  struct Context {
    const Work& work;
    int64_t rounds;
    double* seconds;
  } context{work, rounds, seconds};
  Team team(threads);
  team.run(
      [](void* given, Member& member) {
        auto& all = *static_cast<Context*>(given);
        all.work(member, -1);  // where a member makes what it needs, near itself
        for (int64_t round = 0; round < all.rounds; ++round) {
          member.meet();
          const double began = now();
          all.work(member, round);
          member.meet();
          if (member.index() == 0) all.seconds[round] = now() - began;
        }
      },
      &context);
}

}  // namespace

ReadLoop read_loop_plain() { return read_plain; }

// Whatever the format, the plain products are sums of floats.
ProductLoop product_loop_plain(LimitFormat) { return {products_plain, 2 * 32}; }

bool time_reads(int threads, int64_t bytes_each, int64_t passes, int64_t rounds, double* seconds) {
  const ReadLoop read = choose_read_loop();
  std::vector<AlignedBuffer> arrays(threads);
  std::atomic<bool> failed{false};
  time_rounds(threads, rounds, seconds, [&](Member& member, int64_t round) {
    AlignedBuffer& own = arrays[member.index()];
    if (round < 0) {
      try {
        own = AlignedBuffer(bytes_each);
      } catch (const std::bad_alloc&) {
        failed = true;  // thrown out of a thread it would end the process
      }
    }
    if (own.bytes() < bytes_each) return;
    int64_t sum = 0;
    for (int64_t pass = 0; pass < passes; ++pass) sum ^= read(own.as<uint8_t>(), bytes_each);
    asm volatile("" : : "r"(sum));
  });
  return !failed;
}

double time_products(int threads, LimitFormat format, int64_t turns, int64_t rounds, double* seconds) {
  const ProductLoop loop = choose_product_loop(format);
  time_rounds(threads, rounds, seconds, [&](Member&, int64_t) { loop.run(turns); });
  return static_cast<double>(loop.operations) * static_cast<double>(turns) * threads;
}

void time_meetings(int threads, int64_t meetings, int64_t rounds, double* seconds) {
  time_rounds(threads, rounds, seconds, [&](Member& member, int64_t) {
    for (int64_t meeting = 0; meeting < meetings; ++meeting) member.each(member.size(), [](int64_t) {});
  });
}

}  // namespace trivet
