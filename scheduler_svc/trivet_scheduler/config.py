"""The scheduler's settings: data, nothing else."""

from typing import Annotated, Literal

import msgspec
from trivet_chassis.addresses import parse_address, refuse_public
from trivet_chassis.logging import LogFormat, LogLevel
from trivet_chassis.settings import Setting

from trivet_scheduler.core import CoreSettings
from trivet_scheduler.step_limits import StepLimits


class SchedulerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """One scheduler process."""

    listen: Annotated[str, Setting(help="where frontends and workers dial: host:port or unix:/path")] = "127.0.0.1:7100"
    metrics_listen: Annotated[str, Setting(help="where /metrics and /health answer; empty for nowhere")] = "127.0.0.1:7101"
    insecure: Annotated[bool, Setting(help="allow addresses that other machines can reach")] = False
    name: Annotated[str, Setting(help="stable name of this scheduler, in logs and metrics")] = "scheduler"
    policy: Annotated[Literal["fcfs", "priority"], Setting(help="who runs first")] = "fcfs"
    enable_prefix_caching: Annotated[bool, Setting(help="reuse the KV cache of prompts that begin alike")] = True
    max_num_active_seqs: Annotated[
        int | None, Setting(help="most requests running on one replica; none: the worker's limit", minimum=1)
    ] = None
    long_prefill_token_threshold: Annotated[
        int, Setting(help="most tokens of one prompt in a step while others run; 0: no limit", minimum=0)
    ] = 0
    watermark: Annotated[
        float, Setting(help="share of KV blocks left free when a request starts beside others", minimum=0, maximum=0.5)
    ] = 0.01
    max_waiting_requests: Annotated[int, Setting(help="requests that may wait before new ones are refused", minimum=1)] = 4096
    max_waiting_tokens: Annotated[int, Setting(help="prompt tokens that may wait before new ones are refused", minimum=1)] = 4_000_000
    steps_in_flight: Annotated[int, Setting(help="steps sent to a worker before the first is answered", minimum=1, maximum=2)] = 2
    run_ahead: Annotated[
        int,
        Setting(help="most tokens of each request that a worker computes from one step while nobody comes or goes", minimum=1, maximum=256),
    ] = 16
    step_timeout: Annotated[float, Setting(help="least age of a step at which its worker counts as lost", unit="seconds", minimum=1)] = 10.0
    step_timeout_factor: Annotated[float, Setting(help="a step is given this many times its forecast, if that is more", minimum=1)] = 20.0
    first_step_timeout: Annotated[
        float, Setting(help="the same for steps without a forecast: a new worker's first, which may compile", unit="seconds", minimum=1)
    ] = 120.0
    replica_timeout: Annotated[
        float, Setting(help="how long a request waits for a worker to come, or to come back, when there is none", unit="seconds", minimum=0)
    ] = 60.0
    drain_timeout: Annotated[float, Setting(help="how long running requests may go on after SIGTERM", unit="seconds", minimum=0)] = 30.0
    log_level: Annotated[LogLevel, Setting(help="least severe level that is logged")] = "info"
    log_format: Annotated[LogFormat, Setting(help="text, json, or auto: text on a terminal")] = "auto"

    def check(self) -> None:
        """Raises INVALID_ARGUMENT for what cannot work together."""
        way_out = "bind 127.0.0.1 or a Unix socket, or set --insecure if the network is trusted"
        refuse_public(parse_address(self.listen, "listen"), "listen", allowed=self.insecure, way_out=way_out)
        if self.metrics_listen:
            refuse_public(parse_address(self.metrics_listen, "metrics_listen"), "metrics_listen", allowed=self.insecure, way_out=way_out)

    @property
    def core(self) -> CoreSettings:
        return CoreSettings(
            policy=self.policy,
            enable_prefix_caching=self.enable_prefix_caching,
            max_num_active_seqs=self.max_num_active_seqs,
            long_prefill_token_threshold=self.long_prefill_token_threshold,
            watermark=self.watermark,
            max_waiting_requests=self.max_waiting_requests,
            max_waiting_tokens=self.max_waiting_tokens,
            steps_in_flight=self.steps_in_flight,
            run_ahead=self.run_ahead,
        )

    @property
    def step_limits(self) -> StepLimits:
        return StepLimits(floor_s=self.step_timeout, factor=self.step_timeout_factor, first_s=self.first_step_timeout)
