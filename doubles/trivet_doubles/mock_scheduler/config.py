"""The mock scheduler's settings: data, nothing else."""

from typing import Annotated

import msgspec
from trivet_chassis.addresses import parse_address, refuse_public
from trivet_chassis.logging import LogFormat, LogLevel
from trivet_chassis.settings import Setting
from trivet_proto.errors import invalid

from trivet_doubles.mock_scheduler.faults import Faults
from trivet_doubles.model import refuse_both


class MockSchedulerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """One mock scheduler. Outputs of the faults are messages, counted within each session from 1."""

    model: Annotated[
        str, Setting(help="GGUF file or Hugging Face folder whose tokenizer it speaks for; none: the embedded default", positional=True)
    ] = ""
    synthetic: Annotated[bool, Setting(help="needs no model files: a tiny tokenizer made in code")] = False
    listen: Annotated[str, Setting(help="where frontends dial: host:port or unix:/path")] = "127.0.0.1:7100"
    metrics_listen: Annotated[str, Setting(help="where /metrics and /health answer; empty for nowhere")] = "127.0.0.1:7101"
    insecure: Annotated[bool, Setting(help="allow addresses that other machines can reach")] = False
    name: Annotated[str, Setting(help="stable name of this scheduler")] = "mock-scheduler"
    served_model_name: Annotated[str, Setting(help="the model's name to clients; none: the file's")] = ""
    max_model_len: Annotated[int | None, Setting(help="context, in tokens; none: the model's own", minimum=2)] = None
    max_num_seqs: Annotated[int, Setting(help="requests that run at once in a session; others wait", minimum=1)] = 256
    step_time: Annotated[float, Setting(help="modelled time between two tokens of a request", unit="seconds", minimum=0)] = 0.0
    prompt_token_time: Annotated[
        float, Setting(help="modelled time of each prompt token before a request's first", unit="seconds", minimum=0)
    ] = 0.0
    tokens_per_step: Annotated[int, Setting(help="tokens that each request gets in a step", minimum=1)] = 1
    end_every: Annotated[int, Setting(help="about every so manieth token is an end token; 0: none ever", minimum=0)] = 0
    replicas: Annotated[int, Setting(help="workers that it says are ready; 0: not ready", minimum=0)] = 1
    drain_timeout: Annotated[float, Setting(help="how long running requests may go on after SIGTERM", unit="seconds", minimum=0)] = 5.0
    refuse_every: Annotated[int, Setting(help="fault: every so manieth request is refused as overloaded; 0: none", minimum=0)] = 0
    fail_after: Annotated[int, Setting(help="fault: each request ends with an error after so many tokens; 0: none", minimum=0)] = 0
    end_session_after: Annotated[int, Setting(help="fault: each session ends after so many outputs; 0: never", minimum=0)] = 0
    stall_after: Annotated[int, Setting(help="fault: each session stalls after so many outputs; 0: never", minimum=0)] = 0
    stall_for: Annotated[float, Setting(help="how long a stall lasts", unit="seconds", minimum=0)] = 5.0
    silent: Annotated[bool, Setting(help="fault: no heartbeats while it stalls")] = False
    unknown_rows: Annotated[bool, Setting(help="fault: every output has a row of a handle that nobody gave")] = False
    garbage_after: Annotated[int, Setting(help="fault: this output of each session cannot be read; 0: none", minimum=0)] = 0
    die_after: Annotated[int, Setting(help="fault: kill itself (SIGKILL) after so many outputs in all; 0: never", minimum=0)] = 0
    log_level: Annotated[LogLevel, Setting(help="least severe level that is logged")] = "info"
    log_format: Annotated[LogFormat, Setting(help="text, json, or auto: text on a terminal")] = "auto"

    def check(self) -> None:
        """Raises INVALID_ARGUMENT for what cannot work."""
        way_out = "bind 127.0.0.1 or a Unix socket, or set --insecure if the network is trusted"
        for name, address in (("listen", self.listen), ("metrics_listen", self.metrics_listen)):
            if address:
                refuse_public(parse_address(address, name), name, allowed=self.insecure, way_out=way_out)
        refuse_both(self.model, is_synthetic=self.synthetic)
        self.faults.check()

    @property
    def faults(self) -> Faults:
        return Faults(
            refuse_every=self.refuse_every,
            fail_after=self.fail_after,
            end_session_after=self.end_session_after,
            stall_after=self.stall_after,
            stall_for=self.stall_for,
            silent=self.silent,
            unknown_rows=self.unknown_rows,
            garbage_after=self.garbage_after,
            die_after=self.die_after,
        )

    def context(self, of_model: int) -> int:
        """Raises INVALID_ARGUMENT when more is asked than the model has."""
        if self.max_model_len is not None and self.max_model_len > of_model:
            raise invalid(f"max_model_len: {self.max_model_len} is above the model's context of {of_model}", "max_model_len")
        return self.max_model_len or of_model
