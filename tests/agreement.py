"""Asks a deployment for the continuations of the greedy references and says where the first difference is.

It asks with `ignore_eos`, as the references go through the end-of-sequence token. Nothing is compared with a tolerance: the references
have no near ties, so any other token is a fault.
"""

from collections.abc import Sequence
from typing import Any

from tests.gateway import Gateway, ids_of, together
from tests.references.greedy import Reference


async def continuation(gateway: Gateway, reference: Reference, **fields: Any) -> Any:
    """The whole answer; `fields` may add to the request."""
    wishes = {"max_tokens": len(reference.output_ids), "ignore_eos": True, "return_token_ids": True} | fields
    return await gateway.complete(list(reference.prompt_ids), **wishes)


async def all_at_once(gateway: Gateway, references: Sequence[Reference], **fields: Any) -> list[Any]:
    return await together(*(continuation(gateway, reference, **fields) for reference in references))


def difference(reference: Reference, answer: Any) -> str | None:
    """Where the answer leaves the reference, or None."""
    got, wanted = ids_of(answer), list(reference.output_ids)
    if got == wanted:
        return None
    place = next((at for at, (ours, theirs) in enumerate(zip(got, wanted, strict=False)) if ours != theirs), min(len(got), len(wanted)))
    led_by = reference.gaps[place] if place < len(wanted) else None
    return f"{reference.name}: {len(got)} ids, other than the reference from place {place} (a lead of {led_by}): {got[place : place + 5]}"


def assert_agreement(references: Sequence[Reference], answers: Sequence[Any]) -> None:
    found = [each for each in map(difference, references, answers) if each]
    assert not found, "\n".join(found)
    for reference, answer in zip(references, answers, strict=True):
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["prompt_tokens"] == len(reference.prompt_ids)
        assert answer["usage"]["completion_tokens"] == len(reference.output_ids)
