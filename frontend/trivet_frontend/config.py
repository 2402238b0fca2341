"""The frontend's settings."""

from typing import Annotated, Literal

import msgspec
from trivet_chassis.logging import LogFormat, LogLevel
from trivet_chassis.settings import Setting
from trivet_proto.limits import MAX_MESSAGE_BYTES


class FrontendSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What can be set, and what it means. Only `scheduler` usually needs to be."""

    scheduler: Annotated[
        tuple[str, ...],
        Setting(help="schedulers to dial, separated by commas: host:port, unix:/path, or dns:NAME:PORT for every address of a name"),
    ] = ("127.0.0.1:7100",)
    host: Annotated[str, Setting(help="address that the HTTP API listens on")] = "127.0.0.1"
    port: Annotated[int, Setting(help="port of the HTTP API; 0 takes a free one", minimum=0, maximum=65535)] = 8000
    uds: Annotated[str, Setting(help="path of a Unix socket for the HTTP API, instead of host and port")] = ""
    grpc_listen: Annotated[str, Setting(help="address of the public gRPC API: host:port or unix:/path; empty: not served")] = (
        "127.0.0.1:8001"
    )
    insecure: Annotated[bool, Setting(help="allow an address that other machines reach without an API key")] = False
    api_key: Annotated[tuple[str, ...], Setting(help="keys of which callers must send one, separated by commas", secret=True)] = ()
    served_model_name: Annotated[tuple[str, ...], Setting(help="names the model answers to, separated by commas; empty: its own name")] = ()
    chat_template: Annotated[str, Setting(help="file with a Jinja chat template, instead of the model's own")] = ""
    exit_on_unreadable_model: Annotated[
        bool, Setting(help="end if the first model that comes has a tokenizer or chat template that cannot be read, not wait for another")
    ] = False
    trust_request_chat_template: Annotated[bool, Setting(help="let a request bring its own chat template")] = False
    generation_config: Annotated[
        Literal["auto", "neutral"], Setting(help="sampling defaults: the model's own generation_config, or none")
    ] = "auto"
    unknown_fields: Annotated[
        Literal["ignore", "log", "refuse"], Setting(help="what is done about fields of a request that nobody knows")
    ] = "ignore"
    allowed_origins: Annotated[
        tuple[str, ...], Setting(help="origins that browsers may call from (CORS), separated by commas; * is any")
    ] = ()
    root_path: Annotated[str, Setting(help="path that a proxy puts before ours")] = ""
    max_body_bytes: Annotated[int, Setting(help="largest HTTP body", unit="bytes", minimum=1024)] = MAX_MESSAGE_BYTES
    max_requests: Annotated[int, Setting(help="requests served at one time; more are told to come back", minimum=1)] = 2048
    tokenizer_threads: Annotated[int, Setting(help="threads for tokenizing; 0: one per core", minimum=0)] = 0
    slow_client_timeout: Annotated[
        float, Setting(help="after so long a stream that its client does not read is given up", unit="seconds", minimum=1)
    ] = 60.0
    request_timeout: Annotated[
        float, Setting(help="how long any request may take; 0: as long as its caller waits", unit="seconds", minimum=0)
    ] = 0.0
    handover_timeout: Annotated[
        float,
        Setting(help="how long a request whose scheduler is lost may wait for another; 0: it ends at once", unit="seconds", minimum=0),
    ] = 60.0
    sse_keepalive: Annotated[
        float, Setting(help="a stream that has nothing to say sends a comment so often; 0: never", unit="seconds", minimum=0)
    ] = 15.0
    header_timeout: Annotated[float, Setting(help="time for the head of an HTTP request to come", unit="seconds", minimum=0.1)] = 30.0
    body_timeout: Annotated[float, Setting(help="time for the body of an HTTP request to come", unit="seconds", minimum=0.1)] = 120.0
    max_connections: Annotated[int, Setting(help="HTTP connections open at one time; more are told to come back", minimum=1)] = 4096
    drain_timeout: Annotated[float, Setting(help="on SIGTERM running requests may take so long to finish", unit="seconds", minimum=0)] = (
        30.0
    )
    name: Annotated[str, Setting(help="stable name of this frontend to schedulers; empty: host and process")] = ""
    log_level: Annotated[LogLevel, Setting(help="least level that is logged")] = "info"
    log_format: Annotated[LogFormat, Setting(help="text on a terminal and JSON otherwise, or always one")] = "auto"
