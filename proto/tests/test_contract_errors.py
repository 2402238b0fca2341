"""Errors survive the wire, and every kind has one appearance."""

import pickle

import pytest
from trivet_proto.errors import APPEARANCES, ErrorKind, TrivetError
from trivet_proto.v1 import types_pb2


def test_the_python_kinds_mirror_those_of_the_contract() -> None:
    wire = {name.removeprefix("ERROR_KIND_"): number for name, number in types_pb2.ErrorKind.items()}
    assert wire == {kind.name: int(kind) for kind in ErrorKind}


def test_every_kind_has_an_appearance_with_an_error_status() -> None:
    assert set(APPEARANCES) == set(ErrorKind)
    for kind, appearance in APPEARANCES.items():
        assert 400 <= appearance.http_status < 600, kind


@pytest.mark.parametrize("kind", list(ErrorKind))
def test_an_error_is_the_same_after_the_wire(kind: ErrorKind) -> None:
    error = TrivetError(kind, "why and the way out", param="top_p", retryable=True, retry_after_ms=0)
    for copy in (TrivetError.from_proto(error.to_proto()), pickle.loads(pickle.dumps(error))):
        assert (copy.kind, copy.message, copy.param, copy.retryable, copy.retry_after_ms) == (kind, error.message, "top_p", True, 0)


def test_a_kind_of_a_newer_peer_reads_as_internal() -> None:
    message = types_pb2.Error(message="new")
    message.ParseFromString(message.SerializeToString() + b"\x08\xe7\x07")  # kind = 999
    assert TrivetError.from_proto(message).kind is ErrorKind.INTERNAL
