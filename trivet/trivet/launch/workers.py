"""The workers of a launch: as many as wanted, alike but for their names, their sockets and their share of the machine."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from trivet_chassis.addresses import Address, parse_address
from trivet_chassis.cores import usable_cores
from trivet_worker.config import WorkerSettings

from trivet.launch.arguments import LAUNCHER, Argument, Resolved, resolve
from trivet.launch.ownership import WORKER
from trivet.launch.settings import LoadedServeSettings

LEAST_MEMORY_SHARE = 0.01
ITS_OWN = ("--scheduler=", "--name=", "--listen=", "--metrics-listen=", "--log-format=")
"""Flags of a planned worker that another one must not share."""


def resolve_workers(
    settings: LoadedServeSettings, environ: Mapping[str, str], run_directory: Path, scheduler_address: str, logs: Argument
) -> list[Resolved[WorkerSettings]]:
    """`worker-0` and so on. Raises where the worker's settings are not right."""
    count = settings.value.workers
    first: Resolved[WorkerSettings] | None = None
    workers = []
    for index in range(count):
        name = f"{WORKER}-{index}"
        arguments = [
            Argument("scheduler", scheduler_address, LAUNCHER),
            Argument("name", name, LAUNCHER),
            Argument("listen", f"unix:{run_directory}/{name}.sock", LAUNCHER),
            *_metrics_address(first, index, f"unix:{run_directory}/{name}-metrics.sock"),
            *_share_of_machine(count, environ),
            logs,
        ]
        worker = resolve(WORKER, WorkerSettings, settings, environ, tuple(arguments), name=name)
        first = first or worker
        workers.append(worker)
    return workers


def one_more_worker(settings: LoadedServeSettings, like: Resolved[WorkerSettings]) -> tuple[str, ...]:
    """The command of a worker as `like`, at the same scheduler, which nobody else looks after."""
    words = tuple(word for word in like.command if not word.startswith(ITS_OWN))
    config = () if settings.config_file is None else (f"--config={settings.config_file}",)
    return (*words, *config, f"--scheduler={like.value.scheduler[0]}", "--listen=", "--metrics-listen=")


def _metrics_address(first: Resolved[WorkerSettings] | None, index: int, private: str) -> Iterator[Argument]:
    """A socket of the worker's own; where somebody chose an address, the others come behind the first."""
    chosen = None if first is None or first.loaded.origins["metrics_listen"] == LAUNCHER else first.value.metrics_listen
    if chosen is None:
        yield Argument("metrics_listen", private, LAUNCHER, yields=True)
    else:
        yield Argument("metrics_listen", _behind(chosen, index), LAUNCHER)


def _behind(chosen: str, index: int) -> str:
    """The next port, or the next name of a socket."""
    address = parse_address(chosen, "metrics_listen")
    if address.is_unix:
        return f"unix:{address.path}.{index}"
    return str(Address(host=address.host, port=address.port + index if address.port else 0))


def _share_of_machine(count: int, environ: Mapping[str, str]) -> Iterator[Argument]:
    """Cores and memory, divided: a worker by itself takes as much as it would alone."""
    if count == 1:
        return
    if "OMP_NUM_THREADS" not in environ:  # that says it of each process
        yield Argument("threads", max(1, usable_cores() // count), LAUNCHER, yields=True)
    share = max(LEAST_MEMORY_SHARE, WorkerSettings().memory_utilization / count)
    yield Argument("memory_utilization", round(share, 4), LAUNCHER, yields=True)
