"""A running scheduler with its worker, as the frontend of an `LLM` reaches it, wherever they run."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import NoReturn, TypeAlias

from trivet_chassis.rpc import Dial


@dataclass(frozen=True, slots=True)
class RunningEngine:
    """`dial` reaches the scheduler at `address`. `life` ends only by an exception: what the engine died of."""

    address: str
    dial: Dial
    life: "asyncio.Task[NoReturn]"


OpenEngine: TypeAlias = Callable[[], AbstractAsyncContextManager[RunningEngine]]
"""Starts an engine, which is ready inside the block and gone after it. Raises `TrivetError` where it cannot start."""
