"""What a leak would show in: the counts of live things that each service of a deployment reports of itself.

Read off the services' own `/metrics`, whose Unix sockets lie in the deployment's folder. It judges nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.deployment import Deployment

NAMES = ("trivet_tasks", "trivet_streams", "trivet_blocks_in_use", "process_open_fds")
SERVICES = ("scheduler", "worker")


@dataclass(frozen=True, slots=True)
class Observables:
    """Values by (service, name); only those that the service has."""

    values: Mapping[tuple[str, str], float]

    def risen_above(self, before: "Observables") -> dict[tuple[str, str], tuple[float, float]]:
        """What is greater than it was, as (before, now)."""
        return {key: (before.values[key], value) for key, value in self.values.items() if value > before.values[key]}


async def observe(deployment: Deployment) -> Observables:
    """One reading of all services."""
    values: dict[tuple[str, str], float] = {}
    async with httpx.AsyncClient(base_url=deployment.base_url, timeout=5, headers={"Connection": "close"}) as gateway:
        values |= _of("frontend", (await gateway.get("/metrics")).text)
    for service in SERVICES:
        for socket in deployment.folder.rglob(f"{service}*-metrics.sock"):
            async with httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(uds=str(socket)), base_url="http://service", timeout=5) as one:
                values |= _of(socket.name.removesuffix("-metrics.sock"), (await one.get("/metrics")).text)
    return Observables(values)


def _of(service: str, page: str) -> dict[tuple[str, str], float]:
    """Sums over labels: the frontend shows the blocks of every scheduler it knows."""
    found: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name in NAMES:
                found[service, sample.name] = found.get((service, sample.name), 0.0) + sample.value
    return found
