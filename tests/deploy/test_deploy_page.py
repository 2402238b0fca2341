"""`docs/deployment.md`: what can run without an engine runs, and what it names is there."""

import re
import subprocess
from pathlib import Path

import pytest
from trivet_chassis.settings import PREFIX
from trivet_frontend.config import FrontendSettings
from trivet_scheduler.config import SchedulerSettings
from trivet_worker.config import WorkerSettings

from tests.deploy.compose_file import ROOT, written
from tests.deployment import Deployment

PAGE = (ROOT / "docs" / "deployment.md").read_text()
COMMANDS: list[str] = re.findall(r"^```sh\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
ADDRESS = "http://127.0.0.1:8000"
COMPOSE_FILES = [ROOT / "docker-compose.yml", *sorted((ROOT / "deploy").glob("compose.*.yml"))]
SETTINGS = {"FRONTEND": FrontendSettings, "SCHEDULER": SchedulerSettings, "WORKER": WorkerSettings}
PORT_ROW = re.compile(r"^\| ([\w-]+) \| (\d+) \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_does_what_it_says(server: Deployment, command: str) -> None:
    assert ADDRESS in command
    answer = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command.replace(ADDRESS, server.base_url)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert "ready" in answer.stdout or "vllm:" in answer.stdout


def test_every_file_it_names_is_there() -> None:
    named = {*re.findall(r"deploy/[\w./-]+", PAGE), *(f"docs/{page}" for page in re.findall(r"\]\(([\w./-]+)\)", PAGE))}
    assert named
    assert all(Path(ROOT, name).exists() for name in named)


def test_every_setting_it_names_is_one() -> None:
    names = set(re.findall(rf"\b{PREFIX}[A-Z_]+\b", PAGE)) - {f"{PREFIX}"}
    assert len(names) > 5
    for name in names:
        service, _, setting = name.removeprefix(PREFIX).partition("_")
        assert setting.lower() in SETTINGS[service].__struct_fields__, name


def test_every_variable_that_compose_reads_has_a_line() -> None:
    read = {name for file in COMPOSE_FILES for name in re.findall(r"\$\{([A-Z_]+)", file.read_text())}
    assert read
    missing = [name for name in read if not name.startswith(PREFIX) and f"`{name}`" not in PAGE]
    assert not missing


def test_the_table_has_the_ports_of_compose() -> None:
    services = written()["services"]
    rows = {(service, int(port)): published for service, port, _, published in PORT_ROW.findall(PAGE)}
    for name, service in services.items():
        for port in service.get("expose", ()):
            assert rows[name, int(port)] == "no"
        for port in service.get("ports", ()):
            assert rows[name, int(port.rpartition(":")[2])] != "no"
    balancer = (ROOT / "deploy" / "haproxy" / "haproxy.cfg").read_text()
    assert {int(port) for port in re.findall(r"bind \S*:(\d+)", balancer)} == {port for name, port in rows if name == "load-balancer"}


def test_grace_and_drain_are_as_it_says() -> None:
    services = written()["services"]
    assert {services[name]["stop_grace_period"] for name in ("frontend", "scheduler", "worker", "load-balancer")} == {"60s"}
    assert "Each has 60 s; a drain takes up to 30 s" in PAGE
    assert FrontendSettings().drain_timeout == SchedulerSettings().drain_timeout == WorkerSettings().drain_timeout == 30
