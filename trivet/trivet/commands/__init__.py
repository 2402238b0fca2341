"""The subcommands of `trivet`, one file each; a command takes its arguments and returns an exit code."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from trivet.commands import bench, config, mock_scheduler, mock_worker, serve


@dataclass(frozen=True, slots=True)
class Command:
    summary: str
    run: Callable[[Sequence[str]], int]


COMMANDS: Mapping[str, Command] = {
    "serve": Command("serve a model on this machine: the three services, started and looked after", serve.run),
    "config": Command("print the settings that `trivet serve` with the same flags would use, and where each comes from", config.run),
    "bench": Command("measure servers, services, kernels and the machine", bench.run),
    "mock-worker": Command("a worker without a model, for work on schedulers: tokens by rule, faults on cue", mock_worker.run),
    "mock-scheduler": Command("a scheduler without workers, for work on frontends: tokens by rule, faults on cue", mock_scheduler.run),
}
