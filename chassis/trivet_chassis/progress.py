"""Whether a service that has work gets on with it: the third kind of health, beside live and ready.

A service says whether it has work and how old its last step is; the answer is 200 unless there is work and the step is older than the
service's limit. Nothing here measures or decides when a peer is lost.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import TypeAlias

STEP_LIMIT_S = 10.0
"""The age of a step above which a busy service counts as stuck, where the service sets no other limit."""

Measure: TypeAlias = Callable[[], tuple[bool, float | None]]
"""Whether there is work, and the age of the last step in seconds; None when nothing is known of steps."""


@dataclass(frozen=True, slots=True)
class Progress:
    """One look at a service's work; `limit_s` is the age at which it counts as stuck."""

    busy: bool
    age_s: float | None
    limit_s: float = STEP_LIMIT_S

    @property
    def is_stuck(self) -> bool:
        return self.busy and self.age_s is not None and self.age_s > self.limit_s

    @property
    def status(self) -> HTTPStatus:
        return HTTPStatus.SERVICE_UNAVAILABLE if self.is_stuck else HTTPStatus.OK

    @property
    def body(self) -> bytes:
        """`{"busy": bool, "last_step_age_ms": int or null}`."""
        age_ms = None if self.age_s is None else int(1000 * self.age_s)
        return json.dumps({"busy": self.busy, "last_step_age_ms": age_ms}).encode()


def idle() -> tuple[bool, float | None]:
    """The measure of a service without steps."""
    return False, None
