"""Whether two workers serve one model in one way, so that a request can go on with either."""

from trivet_proto.errors import ErrorKind, TrivetError
from trivet_proto.v1 import types_pb2

SAME_FIELDS = ("max_model_len", "vocab_size", "eos_token_ids")


def check_same_model(newcomer: types_pb2.ModelCard, name: str, present: types_pb2.ModelCard, present_name: str) -> None:
    """Two workers of one scheduler serve one model in one way. Raises FAILED_PRECONDITION with both named."""
    if newcomer.fingerprint != present.fingerprint:
        raise TrivetError(
            ErrorKind.FAILED_PRECONDITION,
            f"replica {name} serves another model than {present_name}: {_short(newcomer.fingerprint)} and {_short(present.fingerprint)}",
        )
    for field in SAME_FIELDS:
        theirs, ours = getattr(newcomer, field), getattr(present, field)
        if theirs != ours:
            raise TrivetError(
                ErrorKind.FAILED_PRECONDITION,
                f"replica {name} and {present_name} differ in {field}: {theirs!r} and {ours!r}; start both with the same",
            )


def _short(fingerprint: types_pb2.Fingerprint) -> str:
    return f"weights {fingerprint.weights.hex()[:12]}, {fingerprint.dtype}, KV {fingerprint.kv_dtype}"
