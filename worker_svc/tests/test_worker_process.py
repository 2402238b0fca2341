"""The command, its settings and its thread."""

import asyncio
import subprocess
import sys

import pytest
from trivet_proto.errors import TrivetError
from trivet_worker.config import WorkerSettings
from trivet_worker.step_thread import StepThread


def test_help_is_for_people_and_names_every_setting() -> None:
    done = subprocess.run([sys.executable, "-m", "trivet_worker", "--help"], capture_output=True, text=True, timeout=60, check=True)
    for field in WorkerSettings.__struct_fields__:
        assert f"--{field.replace('_', '-')}" in done.stdout or field == "model"
    assert "TRIVET_WORKER_" in done.stdout


def test_a_wrong_setting_is_one_line_and_exit_code_2() -> None:
    command = [sys.executable, "-m", "trivet_worker", "--listen", "0.0.0.0:1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "listen" in done.stderr


def test_nothing_that_runs_needs_transformers(llama_folder) -> None:
    code = (
        "import sys, trivet_worker.server; from trivet_worker.config import WorkerSettings; from trivet_worker.loading import load_model;"
        f"load_model(WorkerSettings(model={str(llama_folder)!r})); assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_auto_is_a_type_that_torch_multiplies_here() -> None:
    assert WorkerSettings().chosen_dtype in ("float32", "bfloat16")
    assert WorkerSettings(dtype="float32").chosen_dtype == "float32"


def test_a_scheduler_address_that_cannot_be_is_refused_before_anything_heavy() -> None:
    with pytest.raises(TrivetError, match="scheduler"):
        WorkerSettings(scheduler=("127.0.0.1:7100", "nowhere")).check()
    with pytest.raises(TrivetError, match="scheduler"):
        WorkerSettings(scheduler=()).check()


async def test_the_thread_runs_in_order_and_hands_on_what_is_raised() -> None:
    thread, got = StepThread(), []
    done = asyncio.Event()
    thread.submit(lambda: 1, got.append)
    thread.submit(lambda: 2, lambda value: (got.append(value), done.set()))
    with pytest.raises(ZeroDivisionError):
        await thread.call(lambda: 1 // 0)
    await asyncio.wait_for(done.wait(), 5)
    assert got == [1, 2]
    assert await thread.call(lambda: 3) == 3
    thread.stop()
