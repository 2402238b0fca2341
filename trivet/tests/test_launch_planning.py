"""Who gets which flag, what the services' own sources still decide, and that nobody sees a secret."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import pytest
from trivet.launch.ownership import FRONTEND, OWNERS, SCHEDULER, WORKER
from trivet.launch.plan import LaunchPlan, ProcessPlan
from trivet.launch.planning import plan_launch
from trivet.launch.settings import load_serve_settings
from trivet_chassis.settings import load_settings
from trivet_frontend.config import FrontendSettings
from trivet_proto.errors import TrivetError
from trivet_scheduler.config import SchedulerSettings
from trivet_worker.config import WorkerSettings

RUN = Path("/run/x")
CLASSES: Mapping[str, type[msgspec.Struct]] = {SCHEDULER: SchedulerSettings, WORKER: WorkerSettings, FRONTEND: FrontendSettings}


def plan(*argv: str, environ: Mapping[str, str] | None = None) -> LaunchPlan:
    settings = load_serve_settings(argv, environ or {}, prog="trivet serve")
    return plan_launch(settings, environ or {}, RUN, log_format="text")


def process(planned: LaunchPlan, name: str) -> ProcessPlan:
    """By the service's name the first of them."""
    return next(process for process in planned.processes if process.name in (name, f"{name}-0"))


def workers_of(planned: LaunchPlan) -> list[ProcessPlan]:
    return [process for process in planned.processes if process.name.startswith(WORKER)]


def values(planned: LaunchPlan, setting: str) -> list[str]:
    """What each worker is told on its command line."""
    prefix = f"--{setting.replace('_', '-')}="
    return [word.removeprefix(prefix) for worker in workers_of(planned) for word in worker.command if word.startswith(prefix)]


def flags(planned: LaunchPlan, name: str) -> Sequence[str]:
    return process(planned, name).command[3:]


@pytest.mark.parametrize(("setting", "owner"), [(setting, owner) for setting, owners in OWNERS.items() for owner in owners])
def test_each_owner_has_the_setting(setting: str, owner: str) -> None:
    assert setting in {field.name for field in msgspec.structs.fields(CLASSES[owner])}


def test_the_scheduler_starts_first_and_the_frontend_last() -> None:
    assert [process.name for process in plan().processes] == [SCHEDULER, "worker-0", FRONTEND]


def test_services_meet_over_sockets_in_the_run_directory() -> None:
    planned = plan()
    for name in (SCHEDULER, WORKER, FRONTEND):
        command = process(planned, name).command
        assert command[:3] == (sys.executable, "-m", f"trivet_{name}")
        assert process(planned, name).health == f"unix:/run/x/{process(planned, name).name}.sock"
    assert "--scheduler=unix:/run/x/scheduler.sock" in flags(planned, FRONTEND)
    assert "--scheduler=unix:/run/x/scheduler.sock" in flags(planned, WORKER)


def test_the_frontend_ends_for_a_model_that_it_cannot_read() -> None:
    assert "--exit-on-unreadable-model" in flags(plan(), FRONTEND)


def test_flags_reach_their_owner_alone() -> None:
    planned = plan("--dtype", "float32", "--no-enable-prefix-caching", "--served-model-name", "a,b", "--port", "9000")
    assert "--dtype=float32" in flags(planned, WORKER)
    assert "--no-enable-prefix-caching" in flags(planned, SCHEDULER)
    assert "--served-model-name=a,b" in flags(planned, FRONTEND)
    assert not any("dtype" in flag or "prefix" in flag for flag in flags(planned, FRONTEND))
    assert planned.gateway.port == 9000


def test_what_was_not_given_is_left_to_the_service() -> None:
    assert not any(flag.startswith(("--dtype", "--block-size", "--port")) for name in CLASSES for flag in flags(plan(), name))


def test_a_secret_is_in_nobodys_command_line_and_in_one_environment() -> None:
    planned = plan("--api-key", "hush", environ={"PATH": "/bin"})
    assert not any("hush" in word for one in planned.processes for word in one.command)
    assert not any("hush" in one.description for one in planned.processes)
    assert [one.name for one in planned.processes if "hush" in one.environment.values()] == [FRONTEND]
    assert planned.gateway.api_key == "hush"


def test_a_service_sees_its_own_variables() -> None:
    planned = plan(environ={"TRIVET_WORKER_DTYPE": "float32", "TRIVET_SERVE_PORT": "9002", "HOME": "/h"})
    assert process(planned, WORKER).environment == {"TRIVET_WORKER_DTYPE": "float32", "HOME": "/h"}
    assert process(planned, SCHEDULER).environment == {"HOME": "/h"}
    assert planned.gateway.port == 9002


def test_the_services_read_the_same_file(tmp_path: Path) -> None:
    file = tmp_path / "trivet.toml"
    file.write_text('[worker]\ndtype = "float32"\n[frontend]\nport = 9003\ngrpc_listen = "127.0.0.1:9004"\ndrain_timeout = 3\n')
    planned = plan("--config", str(file))
    assert all(one.environment["TRIVET_CONFIG"] == str(file) for one in planned.processes)
    assert planned.gateway.port == 9003
    assert planned.gateway.grpc_listen == process(planned, FRONTEND).health == "127.0.0.1:9004"
    assert 3 < process(planned, FRONTEND).stop_within_s < 10
    assert f"dtype = 'float32'  [file {file}]" in process(planned, WORKER).description


def test_descriptions_tell_where_a_value_was_said() -> None:
    described = process(plan("--dtype", "float32", environ={"TRIVET_SERVE_BLOCK_SIZE": "32"}), WORKER).description
    assert "dtype = 'float32'  [flag --dtype]" in described
    assert "block_size = 32  [env TRIVET_SERVE_BLOCK_SIZE]" in described
    assert "scheduler = ('unix:/run/x/scheduler.sock',)  [the launcher]" in described


def test_a_value_that_a_service_refuses_is_refused_before_anything_starts() -> None:
    with pytest.raises(TrivetError, match="--dtype"):
        plan("--dtype", "float99")
    with pytest.raises(TrivetError, match="TRIVET_SCHEDULER_POLICE"):
        plan(environ={"TRIVET_SCHEDULER_POLICE": "fcfs"})


def test_the_scheduler_has_started_when_it_lives_and_the_others_when_they_serve() -> None:
    assert {one.name: one.health_name for one in plan().processes} == {SCHEDULER: "live", "worker-0": "ready", FRONTEND: "ready"}


def test_each_worker_has_a_name_and_sockets_of_its_own_and_a_share_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(7)))
    planned = plan("--workers", "3")
    assert [one.name for one in planned.processes] == [SCHEDULER, "worker-0", "worker-1", "worker-2", FRONTEND]
    assert values(planned, "name") == ["worker-0", "worker-1", "worker-2"]
    assert values(planned, "listen") == [f"unix:/run/x/worker-{index}.sock" for index in range(3)]
    assert values(planned, "metrics_listen") == [f"unix:/run/x/worker-{index}-metrics.sock" for index in range(3)]
    assert values(planned, "scheduler") == ["unix:/run/x/scheduler.sock"] * 3
    assert values(planned, "threads") == ["2"] * 3
    assert all(0.06 < float(share) < 0.07 for share in values(planned, "memory_utilization"))
    assert [one.health for one in workers_of(planned)] == values(planned, "listen")


def test_one_worker_has_the_whole_machine() -> None:
    assert values(plan(), "threads") == values(plan(), "memory_utilization") == []


def test_more_workers_than_cores_have_a_thread_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    assert values(plan("--workers", "5"), "threads") == ["1"] * 5


@pytest.mark.parametrize("words", [["--threads", "9999"], ["--workers", "2", "--threads", "9999"]])
def test_more_threads_than_the_cores_can_run_are_refused_with_the_most(words: list[str]) -> None:
    with pytest.raises(TrivetError, match=r"--threads: 9999 is above \d+: more than 4 threads for each core"):
        plan(*words)


def test_threads_that_were_set_are_kept() -> None:
    assert values(plan("--workers", "2", "--threads", "3"), "threads") == ["3", "3"]
    assert values(plan("--workers", "2", environ={"TRIVET_WORKER_THREADS": "3"}), "threads") == []
    assert values(plan("--workers", "2", environ={"OMP_NUM_THREADS": "3"}), "threads") == []


@pytest.mark.parametrize(
    ("chosen", "got"),
    [
        ("127.0.0.1:9000", ["127.0.0.1:9001", "127.0.0.1:9002"]),
        ("unix:/m/w.sock", ["unix:/m/w.sock.1", "unix:/m/w.sock.2"]),
        ("127.0.0.1:0", ["127.0.0.1:0"] * 2),
    ],
)
def test_workers_metrics_come_behind_the_address_that_was_chosen(chosen: str, got: list[str]) -> None:
    assert values(plan("--workers", "3", environ={"TRIVET_WORKER_METRICS_LISTEN": chosen}), "metrics_listen") == got


def test_one_more_worker_is_like_the_others_but_for_its_name_and_addresses(tmp_path: Path) -> None:
    file = tmp_path / "trivet.toml"
    file.write_text("[worker]\nblock_size = 32\n")
    command = plan("/a/model", "--dtype", "float32", "--config", str(file)).one_more_worker
    assert command[:3] == (sys.executable, "-m", "trivet_worker")
    loaded = load_settings(WorkerSettings, section="worker", prog="", description="", argv=command[3:], environ={})
    assert (loaded.value.model, loaded.value.dtype, loaded.value.block_size) == ("/a/model", "float32", 32)
    assert loaded.value.scheduler == ("unix:/run/x/scheduler.sock",)
    assert (loaded.value.listen, loaded.value.metrics_listen, loaded.value.name) == ("", "", "")
