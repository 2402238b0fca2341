"""`docker-compose.yml`: valid by the specification, and true to the services' settings, ports and images."""

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from jsonschema import Draft202012Validator
from trivet_chassis.addresses import parse_address
from trivet_chassis.settings import PREFIX, load_settings
from trivet_doubles.mock_worker.config import MockWorkerSettings
from trivet_frontend.config import FrontendSettings
from trivet_frontend.engine import identity_of
from trivet_scheduler.config import SchedulerSettings
from trivet_worker.config import WorkerSettings

from tests.deploy.compose_file import FILE, OWN, ROOT, ConfigFailed, environment_of, mounts_of, resolved, run_compose, written
from tests.deploy.dockerfile import read_dockerfile

SETTINGS: dict[str, type[msgspec.Struct]] = {"frontend": FrontendSettings, "scheduler": SchedulerSettings, "worker": WorkerSettings}
SCHEMA = ROOT / "deploy" / "compose-spec" / "compose-spec.json"
FULL_DRAIN_MARGIN_S = 10


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return resolved()


def settings_of(project: dict[str, Any], service: str) -> Any:
    """As the container's process reads them; raises when a variable is no setting of the service, or its value is wrong."""
    environment = environment_of(project, service)
    loaded = load_settings(SETTINGS[service], section=service, prog=service, description="", argv=[], environ=environment)
    check = getattr(loaded.value, "check", None)
    if check is not None:
        check()
    return loaded.value


def seconds(duration: str) -> int:
    parts = re.fullmatch(r"(?:(\d+)m)?(?:(\d+)s)?", duration)
    assert parts is not None, duration
    return 60 * int(parts[1] or 0) + int(parts[2] or 0)


def test_the_file_follows_the_compose_specification() -> None:
    schema = json.loads(SCHEMA.read_text())
    errors = [f"{error.json_path}: {error.message}" for error in Draft202012Validator(schema).iter_errors(written())]
    assert not errors, "\n".join(errors)
    assert "version" not in written()


def test_the_schema_refuses_what_is_no_compose_file() -> None:
    schema = json.loads(SCHEMA.read_text())
    assert list(Draft202012Validator(schema).iter_errors({"services": {"worker": {"image": "worker", "helthcheck": {}}}}))


def test_compose_itself_takes_the_file() -> None:
    run_compose("--profile", "*", "config", "--quiet")


@pytest.mark.parametrize("service", OWN)
def test_every_variable_is_a_setting_of_the_service_and_has_a_right_value(project: dict[str, Any], service: str) -> None:
    assert settings_of(project, service).log_format == "json"
    strange = [name for name in environment_of(project, service) if not name.startswith(f"{PREFIX}{service.upper()}_")]
    assert not strange


@pytest.mark.parametrize("service", OWN)
def test_an_image_is_built_from_a_dockerfile_that_is_there(project: dict[str, Any], service: str) -> None:
    build = project["services"][service]["build"]
    assert Path(build["context"], build["dockerfile"]).is_file()
    taken = {each.rest.partition("=")[0] for each in read_dockerfile(service).all("ARG")}
    assert set(build.get("args", ())) <= taken


def test_services_are_found_where_they_listen(project: dict[str, Any]) -> None:
    scheduler, worker, frontend = (settings_of(project, name) for name in ("scheduler", "worker", "frontend"))
    port = parse_address(scheduler.listen).port
    sought = f"dns:scheduler:{port}"  # every address that the name has is a scheduler
    assert list(frontend.scheduler) == [sought]
    assert sought in (worker.scheduler, *worker.scheduler)
    assert port == 7100
    for name, ports in {
        "scheduler": {port, parse_address(scheduler.metrics_listen).port},
        "worker": {parse_address(worker.metrics_listen).port},
        "frontend": {frontend.port, parse_address(frontend.grpc_listen).port},
    }.items():
        service = project["services"][name]
        assert {int(each) for each in service["expose"]} == ports
        assert ports <= {int(each) for each in read_dockerfile(name).last("EXPOSE").words}


@pytest.mark.parametrize("service", OWN)
def test_health_is_asked_of_a_command_in_the_image_at_an_address_that_is_served(project: dict[str, Any], service: str) -> None:
    kind, *command = project["services"][service]["healthcheck"]["test"]
    own = read_dockerfile(service).health_command
    assert kind == "CMD"
    assert command[:3] == own[:3]
    settings = settings_of(project, service)
    port = settings.port if service == "frontend" else parse_address(settings.metrics_listen).port
    assert re.fullmatch(rf"http://127\.0\.0\.1:{port}/health/(live|ready)", command[3])


def test_the_scheduler_counts_as_healthy_before_a_worker_has_come(project: dict[str, Any]) -> None:
    services = project["services"]
    assert services["worker"]["depends_on"]["scheduler"]["condition"] == "service_healthy"
    # Were it ready that is asked for, workers would wait for it and it for them.
    assert services["scheduler"]["healthcheck"]["test"][-1].endswith("/health/live")
    for name in ("worker", "frontend"):
        assert services[name]["healthcheck"]["test"][-1].endswith("/health/ready")


def test_text_leaves_before_tokens_and_tensors(project: dict[str, Any]) -> None:
    """Compose stops in the reverse order of what depends on what."""
    services = project["services"]
    assert set(services["load-balancer"]["depends_on"]) == {"frontend"}
    assert set(services["frontend"]["depends_on"]) == {"scheduler", "worker"}


@pytest.mark.parametrize("service", OWN)
def test_a_drain_ends_before_the_process_is_killed(project: dict[str, Any], service: str) -> None:
    drain = getattr(settings_of(project, service), "drain_timeout", 0.0)
    assert seconds(project["services"][service]["stop_grace_period"]) >= drain + FULL_DRAIN_MARGIN_S


def test_every_volume_and_network_is_declared_and_every_mounted_file_is_there(project: dict[str, Any]) -> None:
    for name, mount in mounts_of(project):
        if mount["type"] == "volume":
            assert mount["source"] in project["volumes"], name
        else:
            assert Path(mount["source"]).exists(), f"{name} mounts {mount['source']}"
            assert mount["read_only"]
    used = {network for service in project["services"].values() for network in service["networks"]}
    assert used == set(project["networks"])


def test_what_is_published_is_for_this_machine_alone(project: dict[str, Any]) -> None:
    published = {
        (name, port["host_ip"], port["target"]) for name, service in project["services"].items() for port in service.get("ports", ())
    }
    assert {host for _, host, _ in published} == {"127.0.0.1"}
    assert {name for name, _, _ in published} == {"load-balancer", "prometheus", "grafana"}


def test_opening_the_ports_to_others_takes_a_key() -> None:
    with pytest.raises(ConfigFailed, match="TRIVET_FRONTEND_API_KEY"):
        resolved({"PUBLISH_ADDRESS": "0.0.0.0"})
    project = resolved({"PUBLISH_ADDRESS": "0.0.0.0", "TRIVET_FRONTEND_API_KEY": "secret"})
    assert {port["host_ip"] for port in project["services"]["load-balancer"]["ports"]} == {"0.0.0.0"}
    assert settings_of(project, "frontend").api_key == ("secret",)


def test_the_env_file_reaches_the_services_and_what_compose_must_know(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text(
        "TRIVET_FRONTEND_API_KEY=secret\nTRIVET_WORKER_DTYPE=float32\nTRIVET_WORKER_MODEL=/models/some.gguf\n"
        "TRIVET_SCHEDULER_STEPS_IN_FLIGHT=1\nMODELS=/srv/models\nHTTP_PORT=8080\n"
    )
    project = resolved(folder=tmp_path)
    assert settings_of(project, "frontend").api_key == ("secret",)
    assert settings_of(project, "worker").dtype == "float32"
    assert settings_of(project, "worker").model == "/models/some.gguf"
    assert settings_of(project, "scheduler").steps_in_flight == 1
    assert ("worker", "bind", "/srv/models") in [(name, each["type"], each["source"]) for name, each in mounts_of(project)]
    assert "8080" in [port["published"] for port in project["services"]["load-balancer"]["ports"]]


def test_mock_workers_take_the_place_of_workers() -> None:
    project = resolved(overlays=["mock-worker"])
    environment = environment_of(project, "worker")
    settings = load_settings(MockWorkerSettings, section="mock_worker", prog="", description="", argv=[], environ=environment).value
    settings.check()
    assert all(name.startswith(f"{PREFIX}MOCK_WORKER_") for name in environment)
    assert settings.scheduler == "scheduler:7100"
    worker = project["services"]["worker"]
    assert Path(worker["build"]["context"], worker["build"]["dockerfile"]).is_file()
    assert worker["image"] == "trivet-doubles"
    port = parse_address(settings.metrics_listen).port
    assert worker["healthcheck"]["test"][-1] == f"http://127.0.0.1:{port}/health/ready"


def test_workers_of_other_machines_reach_the_scheduler_only_where_that_is_asked_for() -> None:
    with pytest.raises(ConfigFailed, match="SCHEDULER_ADDRESS"):
        resolved(overlays=["remote-workers"])
    [port] = resolved({"SCHEDULER_ADDRESS": "10.0.0.5"}, overlays=["remote-workers"])["services"]["scheduler"]["ports"]
    assert (port["host_ip"], port["published"], port["target"]) == ("10.0.0.5", "7100", 7100)


@pytest.mark.parametrize("overlay", sorted(FILE.parent.glob("deploy/compose.*.yml")), ids=lambda path: path.name)
def test_an_overlay_follows_the_compose_specification(overlay: Path) -> None:
    class Loader(yaml.SafeLoader):
        """Compose's own tags, which say how files are merged."""

    Loader.add_constructor(
        "!override",
        lambda loader, node: (
            loader.construct_mapping(node, deep=True) if isinstance(node, yaml.MappingNode) else loader.construct_sequence(node, deep=True)
        ),
    )
    assert not list(Draft202012Validator(json.loads(SCHEMA.read_text())).iter_errors(yaml.load(overlay.read_text(), Loader)))


def test_our_own_services_can_do_no_more_than_they_need(project: dict[str, Any]) -> None:
    for name in OWN:
        service = project["services"][name]
        assert service["read_only"]
        assert service["cap_drop"] == ["ALL"]
        assert "container_name" not in service, "a fixed name could not be scaled"
        assert "ports" not in service, "a published port could not be scaled"


@pytest.mark.parametrize("service", ["frontend", "worker"])
def test_two_containers_of_a_service_have_different_names(project: dict[str, Any], service: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream of a name ends the older one of that name, and in a container every service is process 1."""
    monkeypatch.setattr("os.getpid", lambda: 1)
    names = set()
    for host in ("3f1c0a", "9b2e77"):
        monkeypatch.setattr("socket.gethostname", lambda host=host: host)
        settings = settings_of(project, service)
        names.add(identity_of(settings.name).name if service == "frontend" else settings.replica_name)
    assert len(names) == 2


def test_watching_is_a_profile() -> None:
    assert set(json.loads(run_compose("config", "--format", "json"))["services"]) == {*OWN, "load-balancer"}
    assert FILE.read_text().count("profiles: [observability]") == 2
