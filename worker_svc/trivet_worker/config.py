"""The worker's settings: data, nothing else; read by the launcher too, which imports no torch."""

import os
import socket
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from trivet_chassis.addresses import parse_address, refuse_public
from trivet_chassis.cores import TOO_MANY_THREADS, most_threads
from trivet_chassis.logging import LogFormat, LogLevel
from trivet_chassis.resolving import Peers
from trivet_chassis.settings import Setting
from trivet_proto.errors import invalid

from trivet_worker.batch_invariance import BatchInvariance
from trivet_worker.models.form import ModelForm
from trivet_worker.weights.quantization import Quantization

Dtype = Literal["auto", "float32", "bfloat16"]
KvDtype = Literal["auto", "int8"]
BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16"}


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """One worker process: one replica."""

    model: Annotated[str, Setting(help="GGUF file or Hugging Face folder; none: the embedded default", positional=True)] = ""
    scheduler: Annotated[
        tuple[str, ...], Setting(help="schedulers, one of which is worked for: host:port, unix:/path, or dns:NAME:PORT for all of a name")
    ] = ("127.0.0.1:7100",)
    rehome_after: Annotated[float, Setting(help="after so long without its scheduler another one is tried", unit="seconds", minimum=0)] = (
        30.0
    )
    name: Annotated[str, Setting(help="stable name of this replica; none: worker-<host>-<process id>")] = ""
    listen: Annotated[str, Setting(help="where the gRPC health service answers; empty for nowhere")] = "127.0.0.1:7200"
    metrics_listen: Annotated[str, Setting(help="where /metrics and /health answer; empty for nowhere")] = "127.0.0.1:7201"
    insecure: Annotated[bool, Setting(help="allow addresses that other machines can reach")] = False
    served_model_name: Annotated[str, Setting(help="the model's name to clients; none: the file's")] = ""
    dtype: Annotated[Dtype, Setting(help="of weights and arithmetic; auto: bfloat16 where the processor has it")] = "auto"
    kv_dtype: Annotated[
        KvDtype, Setting(help="of the KV cache; auto: as dtype; int8: half of bfloat16's memory, a scale for each key and value")
    ] = "auto"
    max_model_len: Annotated[int | None, Setting(help="context, in tokens; none: the model's own", minimum=2)] = None
    block_size: Annotated[int, Setting(help="tokens per KV block", minimum=1, maximum=1024)] = 16
    max_num_seqs: Annotated[int, Setting(help="requests in a step", minimum=1, maximum=4096)] = 64
    max_num_batched_tokens: Annotated[int, Setting(help="tokens in a step", minimum=1)] = 2048
    kv_cache_memory: Annotated[int | None, Setting(help="KV cache; none: by memory_utilization", unit="bytes", minimum=1)] = None
    num_kv_blocks: Annotated[int | None, Setting(help="KV blocks, the null block included; goes before kv_cache_memory", minimum=2)] = None
    memory_utilization: Annotated[
        float, Setting(help="share of the memory that is free after loading which the KV cache may take", minimum=0.01, maximum=0.95)
    ] = 0.2
    load_format: Annotated[Literal["auto", "dummy"], Setting(help="dummy: random weights; only config and tokenizer are read")] = "auto"
    quantization: Annotated[
        Quantization,
        Setting(help="how weights are kept: none: in dtype; gguf: in the file's blocks; int8: 8 bits; int8-dynamic: activations too"),
    ] = "none"
    attention_backend: Annotated[Literal["auto", "cpu", "torch"], Setting(help="how attention runs")] = "auto"
    batch_invariant: Annotated[
        BatchInvariance, Setting(help="a token's logits do not depend on what else is in its step: on is an error where that cannot hold")
    ] = "auto"
    max_logprobs: Annotated[int, Setting(help="most log probabilities beside a token's own; -1: the whole vocabulary", minimum=-1)] = 20
    logits_processors: Annotated[tuple[str, ...], Setting(help="classes that change logits, as package.module:Class")] = ()
    model_form: Annotated[
        ModelForm,
        Setting(help="native: a whole step in native code; layers: layer by layer over the backend's operators; auto: native where it can"),
    ] = "auto"
    threads: Annotated[
        int | None, Setting(help="compute threads; none: one per core", minimum=1, maximum=most_threads(), maximum_reason=TOO_MANY_THREADS)
    ] = None
    spin: Annotated[
        int, Setting(help="turns that a compute thread spins for its next piece of work before it sleeps (GOMP_SPINCOUNT)", minimum=0)
    ] = 1000
    switch_interval: Annotated[
        float,
        Setting(
            help="how long the threads of the interpreter may keep each other waiting (sys.setswitchinterval)",
            unit="seconds",
            minimum=0.00001,
            maximum=1,
        ),
    ] = 0.005
    drain_timeout: Annotated[float, Setting(help="how long running requests may go on after SIGTERM", unit="seconds", minimum=0)] = 30.0
    step_limit: Annotated[float, Setting(help="a step that runs longer is no progress (/health/progress)", unit="seconds", minimum=1)] = (
        120.0
    )
    log_level: Annotated[LogLevel, Setting(help="least severe level that is logged")] = "info"
    log_format: Annotated[LogFormat, Setting(help="text, json, or auto: text on a terminal")] = "auto"

    def check(self) -> None:
        """Raises INVALID_ARGUMENT for what cannot work."""
        if not self.scheduler:
            raise invalid("scheduler: at least one address is needed", "scheduler")
        Peers(self.scheduler, name="scheduler")
        if self.max_logprobs == 0:
            raise invalid("max_logprobs: 0 is no limit that is served; at least 1, or -1 for the whole vocabulary", "max_logprobs")
        way_out = "bind 127.0.0.1 or a Unix socket, or set --insecure if the network is trusted"
        for name, address in (("listen", self.listen), ("metrics_listen", self.metrics_listen)):
            if address:
                refuse_public(parse_address(address, name), name, allowed=self.insecure, way_out=way_out)

    @property
    def replica_name(self) -> str:
        # The host too: in containers every worker is process 1.
        return self.name or f"worker-{socket.gethostname()}-{os.getpid()}"

    @property
    def chosen_dtype(self) -> Literal["float32", "bfloat16"]:
        """What auto means on this machine."""
        if self.dtype == "auto":
            return "bfloat16" if _has_bfloat16() else "float32"
        return self.dtype

    def context(self, of_model: int) -> int:
        """Raises INVALID_ARGUMENT when more is asked than the model was made for."""
        if self.max_model_len is not None and self.max_model_len > of_model:
            raise invalid(f"max_model_len: {self.max_model_len} is above the model's context of {of_model}", "max_model_len")
        return self.max_model_len or of_model


def _has_bfloat16() -> bool:
    """Whether the processor multiplies bfloat16 natively."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return False
    flags = next((set(line.split(":", 1)[1].split()) for line in lines if line.startswith("flags")), set())
    return bool(flags & BFLOAT16_FLAGS)
