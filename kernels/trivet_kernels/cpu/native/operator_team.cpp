#include "operator_team.h"

namespace trivet {

// Never destroyed: at the process's end its sleeping threads end with it, and nobody can be in the middle of a call.
OperatorTeam& OperatorTeam::shared() {
  static OperatorTeam* team = new OperatorTeam();
  return *team;
}

OperatorTeam::OperatorTeam() : team_(new Team(1)) {}

void OperatorTeam::use_threads(int count) {
  std::lock_guard<std::mutex> held(lock_);
  if (team_->size() != count) team_.reset(new Team(count));
}

}  // namespace trivet
