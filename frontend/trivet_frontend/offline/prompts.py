"""What a caller in Python gives as prompts and parameters, made into lists, with what is neither refused by its argument's name.

Arrays of whole numbers are token ids. Whether a token is in the vocabulary is judged where every request is.
"""

from collections.abc import Iterable, Mapping, Sequence, Set
from numbers import Integral
from typing import TypeAlias

from trivet_proto.errors import invalid

from trivet_frontend.offline.sampling_params import SamplingParams

Prompt: TypeAlias = str | list[int]
"""Text, or token ids."""

UNORDERED = (bytes, bytearray, Mapping, Set)
"""Iterables that are no list of anything."""


def prompts_of(given: object) -> list[object]:
    """One entry a prompt, each still to be judged by `prompt_of`. Raises INVALID_ARGUMENT for what has no entries."""
    if isinstance(given, str):
        return [given]
    listed = _listed(given)
    if listed is None:
        raise invalid(f"prompts: {brief(given)} is neither a text, nor a list of token ids, nor a list of either", "prompts")
    return [listed] if listed and all(_is_whole(each) for each in listed) else listed


def prompt_of(entry: object, index: int) -> Prompt:
    """Raises INVALID_ARGUMENT for what is no prompt; `index` is its place among all."""
    if isinstance(entry, str):
        return entry
    # It may be read again, which an iterator cannot be.
    listed = _listed(entry) if isinstance(entry, Sequence) or _is_array(entry) else None
    if listed is None or not all(_is_whole(each) for each in listed):
        raise invalid(f"prompts[{index}]: {brief(entry)} is neither a text nor a list of token ids", "prompts")
    return [int(each) for each in listed]  # type: ignore[call-overload]


def params_of(given: object, count: int) -> list[SamplingParams]:
    """One for each of `count` prompts. Raises INVALID_ARGUMENT for what are none."""
    if given is None or isinstance(given, SamplingParams):
        return [given or SamplingParams()] * count
    listed = None if isinstance(given, str) else _listed(given)
    if listed is None:
        raise invalid(f"sampling_params: {brief(given)} is neither SamplingParams(…) nor a list of them", "sampling_params")
    if len(listed) != count:
        raise invalid(f"sampling_params: {len(listed)} for {count} prompts; give one for all, or one for each", "sampling_params")
    params = []
    for index, each in enumerate(listed):
        if not isinstance(each, SamplingParams):
            raise invalid(f"sampling_params[{index}]: {brief(each)} is not SamplingParams(…)", "sampling_params")
        params.append(each)
    return params


def brief(value: object) -> str:
    """A value as a message shows it."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."


def _listed(value: object) -> list[object] | None:
    """None for what is no list, nor can become one."""
    plain = value.tolist() if _is_array(value) else value  # type: ignore[attr-defined]
    if isinstance(plain, list):
        return plain
    if isinstance(plain, (str, *UNORDERED)) or not isinstance(plain, Iterable):
        return None
    return list(plain)


def _is_array(value: object) -> bool:
    """Of numpy, torch or whatever else speaks so."""
    return hasattr(value, "tolist") and not isinstance(value, type)


def _is_whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)
