"""Entries of a model's description, read with the type that each must have, whatever format they come from.

What does not fit is refused with the file, the key, the value and what was expected. It knows no key by name.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trivet_proto.errors import TrivetError, invalid

FETCH_AGAIN = "fetch it again"
"""The way out of a file that is not as it was written."""
LARGEST_COUNT = 2**31 - 1
LARGEST_NUMBER = 3.4e38  # of float32
LONGEST_SHOWN = 60  # of a value, in a message


@dataclass(frozen=True, slots=True)
class Entries:
    """`where` goes before a key in messages. An entry that is null counts as absent. All that raises raises INVALID_ARGUMENT."""

    values: Mapping[str, Any]
    where: str

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def text(self, key: str, default: str | None = None) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self.refusal(key, "a text")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        value = self._value(key, default)
        if type(value) is not int or not 0 < value <= LARGEST_COUNT:
            raise self.refusal(key, f"one positive whole number, {LARGEST_COUNT} at most", value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._value(key, default)
        if type(value) not in (int, float) or not 0 < value <= LARGEST_NUMBER:
            raise self.refusal(key, "a positive number", value)
        return float(value)

    def flag(self, key: str) -> bool:
        value = self._value(key)
        if not isinstance(value, bool):
            raise self.refusal(key, "true or false")
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        """One or a list of several."""
        value = self._value(key)
        ids = value if isinstance(value, list) else [value]
        if not all(type(index) is int and 0 <= index <= LARGEST_COUNT for index in ids):
            raise self.refusal(key, "the id of a token, a whole number from 0, or a list of such")
        return tuple(ids)

    def token_id(self, key: str, vocab_size: int) -> int:
        value = self._value(key)
        if type(value) is not int or not 0 <= value < vocab_size:
            raise self.refusal(key, f"the id of one of {vocab_size} tokens")
        return value

    def below(self, key: str) -> "Entries":
        """The entries of an object that is an entry itself; none where it is absent."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.refusal(key, "an object")
        return Entries(value or {}, f"{self.where}{key}.")

    def refusal(self, key: str, expected: str, value: object = None) -> TrivetError:
        """`value`: of the entry or, where it is absent, its default."""
        shown = repr(self.values.get(key, value))
        shown = shown if len(shown) <= LONGEST_SHOWN else f"{shown[:LONGEST_SHOWN]}…"
        return invalid(f"{self.where}{key} is {shown}, expected {expected}")

    def _value(self, key: str, default: object = None) -> Any:
        value = self.values.get(key)
        if value is not None:
            return value
        if default is None:
            raise invalid(f"{self.where}{key} is missing")
        return default
