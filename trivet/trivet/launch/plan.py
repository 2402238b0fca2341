"""What a launch starts, as data: which processes, with which arguments and environment, and where each is asked for its health.

`planning.py` makes it out of settings; the supervisor lives by it and knows nothing else of the services.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessPlan:
    """One child process. It has started when the gRPC health service at `health` says SERVING of `health_name`.

    `description` is its settings with their origins, for people.
    """

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    health: str
    health_name: str
    stop_within_s: float
    description: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gateway:
    """Where callers reach the deployment."""

    host: str
    port: int
    uds: str
    grpc_listen: str
    api_key: str = ""


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """The scheduler and its workers, in the order of starting, and where a frontend reaches them.

    `one_more_worker` is the command that a person adds a worker with.
    """

    processes: tuple[ProcessPlan, ...]
    scheduler_address: str
    one_more_worker: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """`processes` in the order of starting; stopping goes the other way, so that the frontend drains first.

    `one_more_worker` is the command that a person adds a worker with.
    """

    processes: tuple[ProcessPlan, ...]
    gateway: Gateway
    one_more_worker: tuple[str, ...]
