"""What `trivet serve` takes. Names are those that a vLLM user knows; None means that the owning service decides.

Most fields belong to one of the services (`ownership.py` says to which); only the last group is the launcher's own. Settings of a service
that are not here are reached by its table in the configuration file or by its `TRIVET_<SERVICE>_<NAME>` variables.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated

import msgspec
from trivet_chassis.logging import LogFormat, LogLevel
from trivet_chassis.settings import CONFIG_VARIABLE, PREFIX, Loaded, Setting, load_settings
from trivet_frontend.config import FrontendSettings
from trivet_proto.errors import TrivetError, invalid
from trivet_scheduler.config import SchedulerSettings
from trivet_worker.config import WorkerSettings

DESCRIPTION = """\
Serve a model on this machine: workers, a scheduler and an OpenAI-compatible gateway, started and looked after.
Ctrl-C lets running requests finish and stops all; a second Ctrl-C stops at once."""


SERVICES: Mapping[str, type[msgspec.Struct]] = {"frontend": FrontendSettings, "scheduler": SchedulerSettings, "worker": WorkerSettings}


class ServeSettings(msgspec.Struct, frozen=True, kw_only=True):
    model: Annotated[
        str | None, Setting(help="a GGUF file or a Hugging Face folder; without it, the embedded SmolLM2-135M-Instruct", positional=True)
    ] = None

    # worker
    dtype: Annotated[str | None, Setting(help="number type of the computation: auto, float32 or bfloat16")] = None
    load_format: Annotated[str | None, Setting(help="auto, or dummy for random weights")] = None
    kv_dtype: Annotated[str | None, Setting(help="number type of the KV cache: auto (as dtype) or int8")] = None
    max_model_len: Annotated[int | None, Setting(help="longest prompt and answer together, instead of the model's own", minimum=1)] = None
    block_size: Annotated[int | None, Setting(help="tokens in a block of the KV cache", minimum=1)] = None
    num_kv_blocks: Annotated[int | None, Setting(help="blocks of the KV cache, instead of sizing it by memory", minimum=2)] = None
    kv_cache_memory: Annotated[str | None, Setting(help="size of the KV cache, such as 2GiB")] = None
    max_num_seqs: Annotated[int | None, Setting(help="requests that run at one time", minimum=1)] = None
    max_num_batched_tokens: Annotated[int | None, Setting(help="tokens computed in one step", minimum=1)] = None
    threads: Annotated[int | None, Setting(help="compute threads of each worker; none: the cores, divided among them", minimum=1)] = None

    quantization: Annotated[
        str | None, Setting(help="how weights are kept: none: in dtype, gguf: in the file's blocks, int8, int8-dynamic")
    ] = None
    attention_backend: Annotated[str | None, Setting(help="auto: native code where it can, torch elsewhere; or cpu or torch")] = None

    batch_invariant: Annotated[str | None, Setting(help="auto; on: an error where logits would depend on the batch; off")] = None
    logits_processors: Annotated[
        tuple[str, ...] | None, Setting(help="classes that change logits, as package.module:Class, separated by commas")
    ] = None

    # scheduler
    policy: Annotated[str | None, Setting(help="who runs first: fcfs or priority")] = None
    step_timeout: Annotated[
        float | None, Setting(help="least age of a step at which its worker counts as lost", unit="seconds", minimum=1)
    ] = None
    replica_timeout: Annotated[
        float | None, Setting(help="how long a request waits for a worker when there is none", unit="seconds", minimum=0)
    ] = None
    enable_prefix_caching: Annotated[bool | None, Setting(help="reuse what is computed of prompts that begin alike")] = None

    # frontend
    host: Annotated[str | None, Setting(help="address that the gateway listens on")] = None
    port: Annotated[int | None, Setting(help="port that the gateway listens on", minimum=1, maximum=65535)] = None
    uds: Annotated[str | None, Setting(help="path of a Unix socket for the gateway, instead of host and port")] = None
    grpc_listen: Annotated[str | None, Setting(help="address of the public gRPC API, such as 127.0.0.1:8001")] = None
    api_key: Annotated[tuple[str, ...] | None, Setting(help="keys of which callers must send one, separated by commas", secret=True)] = None
    insecure: Annotated[bool | None, Setting(help="allow an address that other machines reach without an API key")] = None
    root_path: Annotated[str | None, Setting(help="path that a proxy puts before ours")] = None
    served_model_name: Annotated[tuple[str, ...] | None, Setting(help="names the model answers to, separated by commas")] = None
    chat_template: Annotated[str | None, Setting(help="file with a Jinja chat template, instead of the model's own")] = None
    generation_config: Annotated[str | None, Setting(help="sampling defaults: auto for the model's own, or neutral")] = None
    handover_timeout: Annotated[
        float | None,
        Setting(help="how long a request whose scheduler is lost waits for one; 0: it ends at once", unit="seconds", minimum=0),
    ] = None
    drain_timeout: Annotated[float | None, Setting(help="running requests may take so long when stopping", unit="seconds", minimum=0)] = (
        None
    )

    # the launcher
    workers: Annotated[int, Setting(help="worker processes, each with the whole model", minimum=1, maximum=64)] = 1
    max_restarts: Annotated[
        int,
        Setting(
            help="restarts within a minute of services that died; one death more stops all. 0: none is restarted, the others go on",
            minimum=0,
        ),
    ] = 5
    startup_timeout: Annotated[float, Setting(help="a service may take so long to become ready", unit="seconds", minimum=1)] = 600.0
    log_level: Annotated[LogLevel, Setting(help="least level that is logged: debug, info, warning or error")] = "info"
    log_format: Annotated[LogFormat, Setting(help="text on a terminal and JSON otherwise (auto), or always text or json")] = "auto"


@dataclass(frozen=True, slots=True)
class LoadedServeSettings:
    """The settings with their origins, and the configuration file that the services read too.

    `of_services`: by a service's name, settings of its own that a program gives it.
    """

    loaded: Loaded[ServeSettings]
    config_file: str | None
    of_services: Mapping[str, Mapping[str, object]] = field(default_factory=dict)

    @property
    def value(self) -> ServeSettings:
        return self.loaded.value

    @property
    def origins(self) -> Mapping[str, str]:
        return self.loaded.origins


def load_serve_settings(
    argv: Sequence[str], environ: Mapping[str, str], *, prog: str, keywords: Mapping[str, object] | None = None
) -> LoadedServeSettings:
    """`keywords` go over all else. Raises `TrivetError` for what a person got wrong."""
    try:
        loaded = load_settings(
            ServeSettings, section="serve", prog=prog, description=DESCRIPTION, argv=argv, environ=environ, keywords=keywords
        )
    except TrivetError as error:
        raise _with_the_owner(error) from error
    return LoadedServeSettings(loaded, _config_file(argv) or environ.get(CONFIG_VARIABLE))


def _with_the_owner(error: TrivetError) -> TrivetError:
    """The error, or, where an unknown flag is a service's own setting, how that is set."""
    name = (error.param or "").removeprefix("--").replace("-", "_")
    owners = [service for service, settings in SERVICES.items() if name in settings.__struct_fields__]
    if error.param is None or not error.param.startswith("--") or name in ServeSettings.__struct_fields__ or not owners:
        return error
    ways = " or ".join(f"{PREFIX}{service.upper()}_{name.upper()}" for service in owners)
    return invalid(
        f"{error.param} is no flag of trivet serve but a setting of the {' and the '.join(owners)}: set the environment variable {ways}, "
        f"or {name} under [{owners[0]}] in a file named by --config",
        error.param,
    )


def _config_file(argv: Sequence[str]) -> str | None:
    """The last `--config FILE` or `--config=FILE`, as the parser, which has accepted `argv`, took it."""
    file = None
    for word, following in pairwise((*argv, "")):
        if word == "--config":
            file = following
        elif word.startswith("--config="):
            file = word.removeprefix("--config=")
    return file
