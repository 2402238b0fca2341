"""Addresses: what is taken, what is refused with which words, and what counts as public."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trivet_chassis.addresses import Address, is_public, parse_address, refuse_public
from trivet_proto.errors import ErrorKind, TrivetError


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:7100", Address(host="127.0.0.1", port=7100)),
        ("localhost:0", Address(host="localhost", port=0)),
        ("[::1]:80", Address(host="::1", port=80)),
        ("scheduler-0.trivet_net:7100", Address(host="scheduler-0.trivet_net", port=7100)),
        ("unix:/run/x.sock", Address(path="/run/x.sock")),
        ("unix:///run/x.sock", Address(path="/run/x.sock")),
    ],
)
def test_an_address_is_understood(text: str, address: Address) -> None:
    assert parse_address(text) == address
    assert parse_address(str(address)) == address


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is not host:port"),
        ("localhost", "is not host:port"),
        (":80", "is not host:port"),
        ("localhost:", "is not host:port"),
        ("localhost:http", "is not host:port"),
        ("localhost:65536", "is not host:port"),
        ("localhost:-1", "is not host:port"),
        ("localhost:٣", "is not host:port"),
        ("::1:80", "in brackets"),
        ("[local]:80", "no IPv6 address"),
        ("[::1:80", "no name of a host"),
        ("http://localhost:80", "leave the scheme out"),
        ("lo cal:80", "no name of a host"),
        ("*:80", "no name of a host"),
        ("unix:x.sock", "absolute path"),
        ("unix:", "absolute path"),
        ("unix:/", "absolute path"),
        ("unix://host/x.sock", "absolute path"),
        ("unix:/a\0b", "absolute path"),
        ("unix:/" + "x" * 107, "the socket path has 108 bytes, 107 are possible"),
    ],
)
def test_a_wrong_address_is_refused_by_name(text: str, words: str) -> None:
    with pytest.raises(TrivetError) as caught:
        parse_address(text, "listen")
    assert caught.value.message.startswith("listen: ")
    assert words in caught.value.message
    assert (caught.value.kind, caught.value.param) == (ErrorKind.INVALID_ARGUMENT, "listen")


@pytest.mark.parametrize("text", ["127.0.0.1:1", "127.8.8.8:1", "[::1]:1", "localhost:1", "LocalHost:1", "unix:/x"])
def test_loopback_and_unix_sockets_are_private(text: str) -> None:
    address = parse_address(text)
    assert not is_public(address)
    refuse_public(address, "listen", allowed=False, way_out="")


@pytest.mark.parametrize("text", ["0.0.0.0:1", "[::]:1", "10.0.0.1:1", "example:1", "localhost.example:1"])
def test_anything_else_is_public_and_needs_leave(text: str) -> None:
    address = parse_address(text)
    assert is_public(address)
    with pytest.raises(TrivetError, match="can be reached from other machines; say --insecure"):
        refuse_public(address, "listen", allowed=False, way_out="say --insecure")
    refuse_public(address, "listen", allowed=True, way_out="")


@given(st.text())
def test_any_text_is_an_address_or_a_trivet_error(text: str) -> None:
    try:
        address = parse_address(text)
    except TrivetError:
        return
    assert parse_address(address.target) == address
