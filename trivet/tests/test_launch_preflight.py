"""A taken address is an error before anything starts, and names the flag."""

import socket
from pathlib import Path

import pytest
from trivet.launch.plan import Gateway
from trivet.launch.preflight import refuse_busy_address
from trivet_proto.errors import TrivetError


def gateway(*, host: str = "127.0.0.1", port: int = 8000, uds: str = "") -> Gateway:
    return Gateway(host=host, port=port, uds=uds, grpc_listen="unix:/run/frontend.sock")


def test_a_busy_port_names_the_port_flag() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(TrivetError, match=f"--port {port}: another process listens on 127.0.0.1:{port}"):
            refuse_busy_address(gateway(port=port))


def test_a_free_port_stays_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    refuse_busy_address(gateway(port=port))
    with socket.create_server(("127.0.0.1", port)):
        pass


def test_a_host_that_is_not_ours_names_the_host_flag() -> None:
    with pytest.raises(TrivetError, match=r"--host 203\.0\.113\.1: "):
        refuse_busy_address(gateway(host="203.0.113.1"))


def test_a_port_that_nobody_would_know_is_refused() -> None:
    with pytest.raises(TrivetError, match="--port 0"):
        refuse_busy_address(gateway(port=0))


def test_a_socket_somebody_listens_on_names_the_uds_flag(tmp_path: Path) -> None:
    path = str(tmp_path / "api.sock")
    with socket.socket(socket.AF_UNIX) as taken:
        taken.bind(path)
        taken.listen()
        with pytest.raises(TrivetError, match=r"--uds .*another process listens there"):
            refuse_busy_address(gateway(uds=path))


def test_a_socket_left_over_makes_way(tmp_path: Path) -> None:
    path = tmp_path / "api.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    refuse_busy_address(gateway(uds=str(path)))
    assert not path.exists()
