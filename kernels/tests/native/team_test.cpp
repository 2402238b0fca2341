// Phases of a team: everything once, in order, however long a member is away from its processor.
#include "team.h"

#include <atomic>
#include <cstdio>
#include <random>
#include <vector>

using namespace trivet;

namespace {

constexpr int STEPS = 20, PHASES = 60, MOST = 37;

struct Run {
  std::vector<int> counts;            // things in each phase
  std::vector<std::vector<int>> sum;  // by phase and thing: how often it was done
  std::vector<int64_t> chain;         // a value that every phase makes from that of the phase before
  std::atomic<int> computed{0}, seen_early{0};
  std::vector<std::mt19937> random;  // one per member
};

void sometimes_away(Run& run, int member) {
  if (run.random[member]() % 40 == 0) std::this_thread::sleep_for(std::chrono::microseconds(300));
}

void live(void* context, Member& member) {
  Run& run = *static_cast<Run*>(context);
  for (int phase = 0; phase < PHASES; ++phase) {
    std::vector<int>& sum = run.sum[phase];
    if (phase % 3 == 0) {
      member.each(run.counts[phase], [&](int64_t item) {
        sometimes_away(run, member.index());
        ++sum[item];
      });
    } else {
      int64_t mine = 0;
      member.race(
          run.counts[phase],
          [&](int64_t item) {
            mine = item;
            run.computed++;
            sometimes_away(run, member.index());
          },
          [&](int64_t item) {
            if (mine != item) run.seen_early++;
            ++sum[item];
          });
    }
    // Whoever goes on finds the phase complete; a late one may find later ones begun too.
    for (int done : sum) {
      if (done != 1) run.seen_early++;
    }
    if (phase % 7 == 0) member.meet();
    member.each(1, [&](int64_t) { run.chain[phase + 1] = run.chain[phase] * 3 + 1; });
  }
}

}  // namespace

int main() {
  int failures = 0;
  bool taken_over = false;
  for (int size : {1, 2, 3, 5}) {
    Team team(size);
    for (int step = 0; step < STEPS; ++step) {
      Run run;
      int64_t expected = 1, raced = 0;
      std::mt19937 random(step);
      run.chain.assign(PHASES + 1, 1);
      for (int phase = 0; phase < PHASES; ++phase) {
        run.counts.push_back(random() % MOST);
        run.sum.emplace_back(run.counts[phase]);
        expected = expected * 3 + 1;
        if (phase % 3 != 0) raced += run.counts[phase];
      }
      for (int member = 0; member < size; ++member) run.random.emplace_back(step * 10 + member);
      team.run(live, &run);
      for (const auto& sum : run.sum) {
        for (int done : sum) failures += done != 1;
      }
      failures += run.seen_early + (run.chain[PHASES] != expected);
      taken_over |= run.computed > raced;
    }
  }
  if (!taken_over) printf("nobody took over what another was at\n");
  printf(failures == 0 && taken_over ? "all right\n" : "%d failures\n", failures);
  return failures != 0 || !taken_over;
}
