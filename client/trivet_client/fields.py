"""Python values into fields of messages: what protobuf would refuse with a bare TypeError is refused by the field's name."""

import json
import operator
from collections.abc import Iterable, Mapping, Sequence

from google.protobuf.message import Message
from trivet_proto.packing import pack_i32

from trivet_client.errors import invalid


def set_field(message: Message, name: str, value: object, *, param: str | None = None) -> None:
    """Set a scalar or append to a repeated field; None leaves it absent. Raises `InvalidRequestError` for `param`, or `name`."""
    if value is None:
        return
    shown = param or name
    try:
        if isinstance(value, Iterable) and not isinstance(value, str | bytes):
            getattr(message, name).extend(value)
        else:
            setattr(message, name, value)
    except (TypeError, ValueError, AttributeError) as error:  # a lone surrogate; one number where a list belongs
        raise invalid(f"{shown}: {_brief(value)} cannot be sent: {error}", shown) from None


def token_ids_field(token_ids: Sequence[int], param: str) -> bytes:
    """int32[n], packed. Raises `InvalidRequestError` for what is no list of such numbers."""
    try:
        return pack_i32([operator.index(each) for each in token_ids])
    except (TypeError, OverflowError):
        raise invalid(f"{param}: {_brief(token_ids)} is no list of token ids, which are whole numbers of 32 bits", param) from None


def json_field(value: Mapping[str, object] | Sequence[Mapping[str, object]] | None, param: str) -> str:
    """`value` as JSON text, empty for None. Raises `InvalidRequestError` for what JSON cannot say."""
    if value is None:
        return ""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise invalid(f"{param} cannot be written as JSON: {error}", param) from None
    return text


def _brief(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
