"""The mock worker's settings: data, nothing else."""

import os
import socket
from typing import Annotated

import msgspec
from trivet_chassis.addresses import parse_address, refuse_public
from trivet_chassis.logging import LogFormat, LogLevel
from trivet_chassis.settings import Setting
from trivet_proto.errors import invalid

from trivet_doubles.mock_worker.faults import Faults
from trivet_doubles.model import refuse_both


class MockWorkerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """One mock worker: one replica. Steps of the faults are counted over its life, from 1."""

    model: Annotated[
        str, Setting(help="GGUF file or Hugging Face folder whose tokenizer it speaks for; none: the embedded default", positional=True)
    ] = ""
    synthetic: Annotated[bool, Setting(help="needs no model files: a tiny tokenizer made in code")] = False
    scheduler: Annotated[str, Setting(help="the scheduler to work for: host:port or unix:/path")] = "127.0.0.1:7100"
    name: Annotated[str, Setting(help="stable name of this replica; none: mock-worker-<host>-<process id>")] = ""
    listen: Annotated[str, Setting(help="where the gRPC health service answers; empty for nowhere")] = "127.0.0.1:7200"
    metrics_listen: Annotated[str, Setting(help="where /metrics and /health answer; empty for nowhere")] = "127.0.0.1:7201"
    insecure: Annotated[bool, Setting(help="allow addresses that other machines can reach")] = False
    served_model_name: Annotated[str, Setting(help="the model's name to clients; none: the file's")] = ""
    max_model_len: Annotated[int | None, Setting(help="context, in tokens; none: the model's own", minimum=2)] = None
    block_size: Annotated[int, Setting(help="tokens per KV block", minimum=1, maximum=1024)] = 16
    max_num_seqs: Annotated[int, Setting(help="requests in a step", minimum=1, maximum=4096)] = 256
    max_num_batched_tokens: Annotated[int, Setting(help="tokens in a step", minimum=1)] = 8192
    num_kv_blocks: Annotated[int, Setting(help="KV blocks, the null block included", minimum=2)] = 8192
    kv_spec: Annotated[
        str, Setting(help="layers it announces: kinds such as full_attention,sliding_window:512, or a JSON list of LayerKvSpec")
    ] = "full_attention"
    steps_in_flight: Annotated[int, Setting(help="steps that it holds at once", minimum=1, maximum=8)] = 2
    run_ahead: Annotated[int, Setting(help="iterations that it runs from one step", minimum=1, maximum=256)] = 64
    step_time: Annotated[float, Setting(help="modelled time of a step", unit="seconds", minimum=0)] = 0.0
    token_time: Annotated[float, Setting(help="modelled time of each token in a step", unit="seconds", minimum=0)] = 0.0
    request_time: Annotated[float, Setting(help="modelled time of each request in a step", unit="seconds", minimum=0)] = 0.0
    end_every: Annotated[int, Setting(help="about every so manieth token is an end token; 0: none ever", minimum=0)] = 0
    fail_step: Annotated[tuple[int, ...], Setting(help="fault: these steps fail, as in 3,7")] = ()
    fail_every: Annotated[int, Setting(help="fault: every so manieth step fails; 0: none", minimum=0)] = 0
    out_of_memory_above: Annotated[
        int, Setting(help="fault: steps of more tokens fail for want of memory and can be tried again smaller; 0: none", minimum=0)
    ] = 0
    non_finite_step: Annotated[tuple[int, ...], Setting(help="fault: the first request of these steps has no finite logits")] = ()
    stall_step: Annotated[tuple[int, ...], Setting(help="fault: these steps take stall_for longer")] = ()
    stall_for: Annotated[float, Setting(help="how long a stall lasts", unit="seconds", minimum=0)] = 5.0
    silent: Annotated[bool, Setting(help="fault: no heartbeats while it stalls")] = False
    die_step: Annotated[int, Setting(help="fault: kill itself (SIGKILL) when this step is to run; 0: never", minimum=0)] = 0
    log_level: Annotated[LogLevel, Setting(help="least severe level that is logged")] = "info"
    log_format: Annotated[LogFormat, Setting(help="text, json, or auto: text on a terminal")] = "auto"

    def check(self) -> None:
        """Raises INVALID_ARGUMENT for what cannot work."""
        parse_address(self.scheduler, "scheduler")
        way_out = "bind 127.0.0.1 or a Unix socket, or set --insecure if the network is trusted"
        for name, address in (("listen", self.listen), ("metrics_listen", self.metrics_listen)):
            if address:
                refuse_public(parse_address(address, name), name, allowed=self.insecure, way_out=way_out)
        refuse_both(self.model, is_synthetic=self.synthetic)
        self.faults.check()

    @property
    def replica_name(self) -> str:
        # The host too: in containers every worker is process 1.
        return self.name or f"mock-worker-{socket.gethostname()}-{os.getpid()}"

    @property
    def faults(self) -> Faults:
        return Faults(
            fail_step=frozenset(self.fail_step),
            fail_every=self.fail_every,
            out_of_memory_above=self.out_of_memory_above,
            non_finite_step=frozenset(self.non_finite_step),
            stall_step=frozenset(self.stall_step),
            stall_for=self.stall_for,
            silent=self.silent,
            die_step=self.die_step,
        )

    def context(self, of_model: int) -> int:
        """Raises INVALID_ARGUMENT when more is asked than the model has."""
        if self.max_model_len is not None and self.max_model_len > of_model:
            raise invalid(f"max_model_len: {self.max_model_len} is above the model's context of {of_model}", "max_model_len")
        return self.max_model_len or of_model

    def modelled_seconds(self, num_requests: int, num_tokens: int) -> float:
        """How long a step is to take."""
        return self.step_time + num_tokens * self.token_time + num_requests * self.request_time
