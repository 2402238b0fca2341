"""Prometheus and Grafana: every replica is scraped where it answers, and every number on the dashboard is one that something counts."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry, ProcessCollector

from tests.deploy.compose_file import OWN, ROOT, written

DEPLOY = ROOT / "deploy"
PROMETHEUS = DEPLOY / "prometheus" / "prometheus.yml"
DASHBOARD = DEPLOY / "grafana" / "dashboards" / "trivet.json"
SOURCES = ("chassis/trivet_chassis", "frontend/trivet_frontend", "scheduler_svc/trivet_scheduler", "worker_svc/trivet_worker")
METRIC = re.compile(r"\b(?:vllm:|trivet_|process_|haproxy_)[a-z0-9_]+")
SERIES_SUFFIX = re.compile(r"_(bucket|sum|count|total)$")

LOAD_BALANCER = {"haproxy_backend_active_servers", "haproxy_backend_http_responses_total"}
"""What we show of HAProxy's; `test_deploy_load_balancer.py` finds them in a running one."""


def jobs() -> dict[str, dict[str, Any]]:
    return {job["job_name"]: job for job in yaml.safe_load(PROMETHEUS.read_text())["scrape_configs"]}


def targets(job: str) -> dict[str, int]:
    """Name and port that a job asks for."""
    return {name: config["port"] for config in jobs()[job]["dns_sd_configs"] for name in config["names"]}


def panels() -> list[dict[str, Any]]:
    return [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] != "row"]


def expressions() -> list[str]:
    return [target["expr"] for panel in panels() for target in panel["targets"]]


def names_in_sources() -> Iterator[str]:
    """Every metric that our code makes, by the names it is given there."""
    for folder in SOURCES:
        for source in (ROOT / folder).rglob("*.py"):
            yield from re.findall(r'"((?:vllm:|trivet_)[a-z0-9_]+)"', source.read_text())


def names_of_a_process() -> set[str]:
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    return {sample.name for family in registry.collect() for sample in family.samples}


def test_every_service_is_scraped_at_a_port_that_it_has() -> None:
    services = written()["services"]
    assert set(jobs()) == {*OWN, "load-balancer"}
    for job in OWN:
        assert list(targets(job)) == [job], "a job has the name of its service"
        assert str(targets(job)[job]) in services[job]["expose"]


def test_the_load_balancer_is_scraped_where_it_has_metrics() -> None:
    configuration = (DEPLOY / "haproxy" / "haproxy.cfg").read_text()
    [port] = re.findall(r"^frontend metrics\n    bind :(\d+)$", configuration, re.MULTILINE)
    assert targets("load-balancer") == {"load-balancer": int(port)}


@pytest.mark.parametrize("job", [*OWN, "load-balancer"])
def test_replicas_are_found_by_name_and_told_apart(job: str) -> None:
    configuration = jobs()[job]
    assert "static_configs" not in configuration, "replicas come and go"
    assert all(each["type"] == "A" for each in configuration["dns_sd_configs"])
    labels = {"__address__": "10.0.0.7:7101", "__meta_dns_name": job}
    for rule in configuration["relabel_configs"]:
        source = ";".join(labels[name] for name in rule["source_labels"])
        found = re.fullmatch(rule.get("regex", "(.*)"), source)
        assert found is not None
        labels[rule["target_label"]] = found[1]
    assert labels["service"] == job
    assert labels["replica"] == "10.0.0.7"


def test_prometheus_reaches_the_networks_of_all_that_it_scrapes() -> None:
    services = written()["services"]
    for job in jobs():
        assert set(services[job]["networks"]) & set(services["prometheus"]["networks"])


def test_prometheus_checks_its_file_where_its_tool_is_installed() -> None:
    tool = shutil.which("promtool")
    if tool is None:
        pytest.skip("promtool is not installed")
    answer = subprocess.run([tool, "check", "config", str(PROMETHEUS)], capture_output=True, text=True, timeout=60, check=False)
    assert answer.returncode == 0, answer.stdout + answer.stderr


def test_the_dashboard_shows_only_what_something_counts() -> None:
    known = {*names_in_sources(), *names_of_a_process(), *LOAD_BALANCER}
    shown = {name for expression in expressions() for name in METRIC.findall(expression)}
    assert len(shown) >= 20
    strange = {name for name in shown if name not in known and SERIES_SUFFIX.sub("", name) not in known}
    assert not strange


def test_nothing_that_frontends_repeat_is_counted_once_per_frontend() -> None:
    """A scheduler's numbers are on every frontend's page too, under the same names; a bare sum would multiply them."""
    for expression in expressions():
        for series in re.findall(r"vllm:[a-z0-9_]+(?:\{[^}]*\})?", expression):
            assert re.search(r'\{job="(frontend|scheduler)"\}$', series), expression


def test_labels_that_pick_a_job_name_one_that_is_there() -> None:
    picked = {job for expression in expressions() for found in re.findall(r'job=~?"([^"]+)"', expression) for job in found.split("|")}
    assert picked
    assert picked <= set(jobs())


def test_panels_stand_side_by_side() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + dx, place["y"] + dy) for dx in range(place["w"]) for dy in range(place["h"])}
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells
    ids = [panel["id"] for panel in json.loads(DASHBOARD.read_text())["panels"]]
    assert len(ids) == len(set(ids))


def test_grafana_is_given_the_source_and_the_dashboard_that_are_used() -> None:
    provisioning = DEPLOY / "grafana" / "provisioning"
    [source] = yaml.safe_load((provisioning / "datasources" / "prometheus.yml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    assert {panel["datasource"]["uid"] for panel in panels()} == {source["uid"]}
    [provider] = yaml.safe_load((provisioning / "dashboards" / "trivet.yml").read_text())["providers"]
    mounted = {volume.split(":")[1]: volume.split(":")[0] for volume in written()["services"]["grafana"]["volumes"]}
    assert Path(mounted[provider["options"]["path"]]) == DASHBOARD.parent.relative_to(ROOT)
    assert Path(mounted["/etc/grafana/provisioning"]) == provisioning.relative_to(ROOT)
    home = written()["services"]["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert Path(home).name == DASHBOARD.name
