"""Unix socket files: stale ones go, live ones and other people's files stay."""

import os
import socket
from pathlib import Path

import pytest
from trivet_chassis.sockets import claim, identity_of, release
from trivet_proto.errors import ErrorKind, TrivetError


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "s")


def bound(path: str, kind: socket.SocketKind = socket.SOCK_STREAM) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, kind)
    made.bind(path)
    return made


def test_a_free_path_is_left_free(path: str) -> None:
    claim(path)
    assert not os.path.lexists(path)


def test_a_stale_socket_makes_way(path: str) -> None:
    bound(path).close()
    assert os.path.exists(path)
    claim(path)
    assert not os.path.exists(path)


def test_a_live_socket_stays(path: str) -> None:
    with bound(path) as listener:
        listener.listen()
        with pytest.raises(TrivetError, match="another process listens there"):
            claim(path)
    assert os.path.exists(path)


def test_a_listener_whose_queue_is_full_is_alive(path: str) -> None:
    with bound(path) as listener:
        listener.listen(0)
        waiting = []
        try:
            while True:
                client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                waiting.append(client)
                client.setblocking(False)
                client.connect(path)
        except BlockingIOError:
            pass
        with pytest.raises(TrivetError, match="another process listens there"):
            claim(path)
        for client in waiting:
            client.close()


def test_a_socket_of_another_kind_stays(path: str) -> None:
    with bound(path, socket.SOCK_DGRAM), pytest.raises(TrivetError, match="another process listens there"):
        claim(path)
    assert os.path.exists(path)


def test_a_file_that_is_no_socket_stays(path: str) -> None:
    Path(path).write_text("precious")
    with pytest.raises(TrivetError, match="exists and is no socket") as caught:
        claim(path)
    assert caught.value.kind is ErrorKind.INVALID_ARGUMENT
    assert Path(path).read_text() == "precious"


def test_a_dangling_link_stays(path: str) -> None:
    os.symlink(path + ".gone", path)
    with pytest.raises(TrivetError, match="is no socket"):
        claim(path)
    assert os.path.islink(path)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(TrivetError, match="none does not exist; make it first"):
        claim(str(tmp_path / "none" / "s"))


def test_release_removes_our_file_and_forgives_a_missing_one(path: str) -> None:
    with bound(path):
        release(path, identity_of(path))
    assert not os.path.exists(path)
    release(path)


def test_release_spares_a_file_that_another_made_since(path: str) -> None:
    first = bound(path)
    ours = identity_of(path)
    os.rename(path, path + ".old")
    with first, bound(path):
        release(path, ours)
        assert os.path.exists(path)
