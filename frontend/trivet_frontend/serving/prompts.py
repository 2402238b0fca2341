"""The prompt field of a completion: text, token ids, or a list of either."""

from typing import Any

from trivet_proto.errors import ErrorKind, TrivetError

MAX_PROMPTS = 1024


def normalised_prompts(prompt: Any, *, vocab_size: int) -> list[str | list[int]]:
    """One entry per prompt, none of them empty; raises `TrivetError` naming the entry at fault."""
    if isinstance(prompt, str):
        return [_checked_text(prompt, "prompt")]
    if not isinstance(prompt, list):
        raise _refuse("prompt must be a string, a list of token ids, or a list of either")
    if not prompt:
        raise _refuse("prompt must not be empty")
    if type(prompt[0]) is int:
        return [_checked_ids(prompt, "prompt", vocab_size=vocab_size)]
    if len(prompt) > MAX_PROMPTS:
        raise _refuse(f"prompt must have at most {MAX_PROMPTS} entries, not {len(prompt)}")
    prompts: list[str | list[int]] = []
    for index, entry in enumerate(prompt):
        place = f"prompt[{index}]"
        if isinstance(entry, str):
            prompts.append(_checked_text(entry, place))
        elif isinstance(entry, list):
            prompts.append(_checked_ids(entry, place, vocab_size=vocab_size))
        else:
            raise _refuse(f"{place} must be a string or a list of token ids")
    return prompts


def _checked_text(text: str, place: str) -> str:
    if not text:
        raise _refuse(f"{place} must not be empty")
    return text


def _checked_ids(ids: list[Any], place: str, *, vocab_size: int) -> list[int]:
    if not ids:
        raise _refuse(f"{place} must not be empty")
    for position, token_id in enumerate(ids):
        # bool is an int to isinstance, and True would pass for token 1.
        if type(token_id) is not int:
            raise _refuse(f"{place}[{position}] must be a token id, a whole number")
        if not 0 <= token_id < vocab_size:
            raise _refuse(f"{place}[{position}] is not in the vocabulary of {vocab_size} tokens")
    return ids


def _refuse(message: str) -> TrivetError:
    return TrivetError(ErrorKind.INVALID_ARGUMENT, message, param="prompt")
