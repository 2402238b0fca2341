"""What is known of a measurement of quality so far: the windows, and each setting's figures of those that were compared.

A file keeps it, so that a run that was ended goes on where it was; one of other settings or tokens is refused. Written whole, beside the
old one, and put in its place.
"""

import os
from pathlib import Path

import msgspec
from trivet_proto.errors import invalid

from trivet.bench.report import check_can_write, written_or_refused


class Compared(msgspec.Struct, frozen=True):
    """Sums over the tokens of one window: by setting the divergence in nats and how often the best token differs, where one led clearly."""

    divergence: list[float]
    differing: list[int]
    led: int
    tokens: int


class State(msgspec.Struct):
    """`about` says what the figures are of: settings, model, texts."""

    about: dict[str, str]
    windows: list[list[int]] = []
    compared: list[Compared] = []


def load_state(file: Path | None, about: dict[str, str]) -> State:
    """What `file` has, or a new one. Raises `TrivetError` where it is of something else or cannot be kept there."""
    check_can_write("--resume", file)
    if file is None or not file.exists():
        return State(about)
    try:
        state = msgspec.json.decode(file.read_bytes(), type=State)
    except msgspec.MsgspecError as error:
        raise invalid(f"--resume {file} is no state of `trivet bench quality` ({error}): name another file") from None
    for name, value in about.items():
        if state.about.get(name) != value:
            was = state.about.get(name, "nothing")
            raise invalid(f"--resume {file} is of another measurement: its {name} is {was}, asked for is {value}; name another file")
    return state


def save_state(file: Path | None, state: State) -> None:
    if file is not None:
        beside = file.with_name(file.name + ".new")
        with written_or_refused("--resume", file):
            beside.write_bytes(msgspec.json.encode(state))
            os.replace(beside, file)
