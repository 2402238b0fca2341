"""Routing: prefix first, until its owner is much busier than the least busy."""

from dataclasses import dataclass

from trivet_frontend.engine.routing import IMBALANCE_LIMIT, PREFIX_TOKENS, Router


@dataclass
class Scheduler:
    address: str
    queue_length: int = 0


def test_a_prefix_returns_to_the_scheduler_that_had_it() -> None:
    router, first, second = Router(), Scheduler("a"), Scheduler("b", 1)
    prompt = list(range(PREFIX_TOKENS))
    assert router.choose([first, second], prompt) is first
    first.queue_length = 3
    assert router.choose([first, second], [*prompt, 99]) is first
    assert router.choose([first, second], [7, 8, 9]) is second


def test_load_beats_the_prefix_beyond_the_limit() -> None:
    router, first, second = Router(), Scheduler("a"), Scheduler("b", 1)
    router.choose([first, second], [1, 2])
    first.queue_length = second.queue_length + IMBALANCE_LIMIT + 1
    assert router.choose([first, second], [1, 2]) is second
    # From here on the prefix is the second one's.
    first.queue_length = 0
    assert router.choose([first, second], [1, 2]) is second


def test_an_owner_that_has_gone_is_forgotten() -> None:
    router, first, second = Router(), Scheduler("a"), Scheduler("b", 5)
    router.choose([first, second], [1])
    assert router.choose([second], [1]) is second
