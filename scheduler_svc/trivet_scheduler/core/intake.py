"""What is refused before it waits: requests that can never run, and more requests than may wait."""

from collections.abc import Sequence

from trivet_proto.errors import ErrorKind, TrivetError, invalid

from trivet_scheduler.core.placement import capacity_tokens
from trivet_scheduler.core.settings import CoreSettings
from trivet_scheduler.queues import WaitingQueue
from trivet_scheduler.replica import Replica
from trivet_scheduler.request import RequestSpec, Resume

RETRY_AFTER_MS = 1000


def check_intake(
    spec: RequestSpec,
    resume: Sequence[Resume],
    max_model_len: int,
    settings: CoreSettings,
    waiting: WaitingQueue,
    replicas: Sequence[Replica],
) -> None:
    """Raises INVALID_ARGUMENT for what can never run, OVERLOADED for what cannot wait."""
    if resume and len(resume) != spec.num_children:
        raise invalid(f"the request has {spec.num_children} children, but what {len(resume)} had already is given", "resume")
    _check_size(spec, max_model_len, replicas)
    num_waiting = len(waiting)
    if num_waiting + spec.num_children > settings.max_waiting_requests:
        raise _overloaded(f"{num_waiting} requests wait already, at most {settings.max_waiting_requests} may")
    tokens = len(spec.prompt) * spec.num_children + sum(len(had.output) for had in resume)
    if num_waiting and waiting.num_uncached_tokens + tokens > settings.max_waiting_tokens:
        raise _overloaded(f"the prompts that wait already and this one exceed {settings.max_waiting_tokens} tokens")


def token_limit(spec: RequestSpec, max_model_len: int) -> int:
    """Tokens at which a request ends, its prompt included. A pool that is too small for so many ends it earlier, when it comes to that."""
    if spec.sampling.HasField("max_tokens"):
        return min(max_model_len, len(spec.prompt) + spec.sampling.max_tokens)
    return max_model_len


def too_long(num_tokens: int, replicas: Sequence[Replica]) -> TrivetError:
    """What a prompt that no replica's cache can hold is answered with."""
    blocks = -(-num_tokens // replicas[0].kv.block_size)
    return invalid(
        f"the prompt of {num_tokens} tokens needs {blocks} KV blocks; the cache holds {capacity_tokens(replicas)} tokens. "
        "Shorten it, or start the worker with more KV blocks",
        "prompt",
    )


def _check_size(spec: RequestSpec, max_model_len: int, replicas: Sequence[Replica]) -> None:
    prompt = len(spec.prompt)
    wanted = spec.sampling.max_tokens if spec.sampling.HasField("max_tokens") else 1
    if prompt == 0:
        raise invalid("the prompt is empty", "prompt")
    if prompt + max(wanted, 1) > max_model_len and not (wanted == 0 and prompt <= max_model_len):
        raise invalid(
            f"the prompt has {prompt} tokens and max_tokens is {wanted}, together more than the context of {max_model_len} tokens",
            "max_tokens",
        )
    if replicas and prompt > capacity_tokens(replicas):
        raise too_long(prompt, replicas)


def _overloaded(message: str) -> TrivetError:
    return TrivetError(ErrorKind.OVERLOADED, message, retry_after_ms=RETRY_AFTER_MS)
