"""What a worker says of itself, checked before anything is built on it.

A worker is another program, perhaps of another version or misconfigured: numbers that make no sense are refused here by name, so that the
KV accounting and the core can rely on them.
"""

from trivet_proto.errors import ErrorKind, TrivetError, invalid
from trivet_proto.packing import unpack_i32
from trivet_proto.revision import agree
from trivet_proto.v1 import worker_pb2

from trivet_scheduler.kv.memory import KVCacheConfig, configure
from trivet_scheduler.kv.registry import ManagerRegistry
from trivet_scheduler.kv.specs import KVCacheSpec
from trivet_scheduler.replica import ReplicaLimits
from trivet_scheduler.replicas.wire import spec_of

LONGEST_NAME = 128
MOST_BLOCKS = 1 << 22  # the accounting takes some 50 bytes a block
MOST = 1 << 24  # of anything else that is counted: far above sense, far below overflow
DIGEST_BYTES = 32


def check_name(name: str, whose: str) -> None:
    """Raises INVALID_ARGUMENT for a name that is empty, too long or would break a log line."""
    if not name or len(name) > LONGEST_NAME or not name.isprintable():
        raise invalid(f"a {whose}'s name has 1 to {LONGEST_NAME} printable characters", "name")


def check_hello(hello: worker_pb2.WorkerHello) -> None:
    """Raises INVALID_ARGUMENT for what makes no sense, FAILED_PRECONDITION for another contract."""
    reason = agree(hello.hello.schema)
    if reason is not None:
        raise TrivetError(ErrorKind.FAILED_PRECONDITION, reason)
    check_name(hello.hello.name, "worker")
    card, limits = hello.card, hello.limits
    for name, value in (
        ("card.vocab_size", card.vocab_size),
        ("limits.max_num_seqs", limits.max_num_seqs),
        ("limits.max_num_batched_tokens", limits.max_num_batched_tokens),
        ("limits.max_model_len", limits.max_model_len),
        ("card.max_model_len", card.max_model_len),
        ("ranks", len(hello.ranks)),
    ):
        if not 1 <= value <= MOST:
            raise invalid(f"{name} is {value}; 1 to {MOST} make sense", name)
    unpack_i32(card.eos_token_ids, "card.eos_token_ids")
    if len(card.bundle_sha256) not in (0, DIGEST_BYTES):
        raise invalid(f"card.bundle_sha256 has {len(card.bundle_sha256)} bytes, a SHA-256 has {DIGEST_BYTES}", "card.bundle_sha256")


def configure_ranks(hello: worker_pb2.WorkerHello, registry: ManagerRegistry) -> list[KVCacheConfig]:
    """The KV cache of each rank; a request has the blocks of the smallest. Raises FAILED_PRECONDITION for what cannot be served."""
    return [_configure_rank(rank, hello.limits.block_size, registry) for rank in hello.ranks]


def limits_of(hello: worker_pb2.WorkerHello) -> ReplicaLimits:
    limits = hello.limits
    return ReplicaLimits(
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_model_len=min(limits.max_model_len, hello.card.max_model_len),
        steps_in_flight=max(1, hello.abilities.steps_in_flight),
        run_ahead=max(1, hello.abilities.run_ahead),
    )


def _configure_rank(rank: worker_pb2.RankResources, block_size: int, registry: ManagerRegistry) -> KVCacheConfig:
    layers: list[tuple[str, KVCacheSpec]] = []
    for layer in rank.layers:
        name = f"layer {layer.layer}"
        for field in ("block_size", "num_heads", "head_size"):
            value = getattr(layer.spec, field)
            if layer.spec.WhichOneof("kind") != "mamba" and not 1 <= value <= MOST:
                raise invalid(f"{name}: {field} is {value}; 1 to {MOST} make sense", field)
        if block_size and layer.spec.block_size != block_size:
            raise invalid(f"{name} has blocks of {layer.spec.block_size} tokens, limits.block_size says {block_size}", "block_size")
        layers.append((layer.layer, spec_of(layer.spec)))
    registry.check(layers)
    config = configure(layers, rank.kv_bytes_available, rank.num_kv_blocks if rank.HasField("num_kv_blocks") else None)
    if config.num_blocks > MOST_BLOCKS:
        raise TrivetError(
            ErrorKind.FAILED_PRECONDITION,
            f"{config.num_blocks} KV blocks are more than a scheduler counts ({MOST_BLOCKS}): set the worker's num_kv_blocks or block_size",
        )
    return config
