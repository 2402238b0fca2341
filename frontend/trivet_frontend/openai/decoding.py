"""Bytes of a body to a request struct, with an error that a caller can act on.

Every failure is INVALID_ARGUMENT and names the field. What becomes of fields that nobody knows is the server's setting.
"""

import enum
import logging
import re
from typing import TypeVar

import msgspec
from trivet_proto.errors import ErrorKind, TrivetError

logger = logging.getLogger(__name__)

BodyT = TypeVar("BodyT", bound=msgspec.Struct)

_TYPE_NAMES = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "a boolean",
    "array": "a list",
    "object": "an object",
    "null": "null",
}
_MISMATCH = re.compile(r"^Expected `(?P<expected>[^`]*)`, got `(?P<got>[^`]*)`")
_MISSING = re.compile(r"^Object missing required field `(?P<field>[^`]*)`")
_PATH = re.compile(r" - at `\$(?P<path>[^`]*)`$")


class UnknownFields(enum.Enum):
    """What is done about fields that no request has."""

    IGNORE = "ignore"
    LOG = "log"
    REFUSE = "refuse"


def decode_body(body: bytes, body_type: type[BodyT], unknown_fields: UnknownFields) -> BodyT:
    """The request in `body`; raises `TrivetError` with the field at fault."""
    try:
        request = msgspec.json.decode(body, type=body_type)
    except msgspec.ValidationError as error:
        raise _explained(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TrivetError(ErrorKind.INVALID_ARGUMENT, f"the body is not valid JSON: {error}") from None
    except RecursionError:
        raise TrivetError(ErrorKind.INVALID_ARGUMENT, "the body is nested too deeply") from None
    if unknown_fields is not UnknownFields.IGNORE:
        _judge_unknown(body, body_type, unknown_fields)
    return request


def _judge_unknown(body: bytes, body_type: type[msgspec.Struct], unknown_fields: UnknownFields) -> None:
    unknown = sorted(msgspec.json.decode(body, type=dict[str, msgspec.Raw]).keys() - set(body_type.__struct_fields__))
    if not unknown:
        return
    if unknown_fields is UnknownFields.REFUSE:
        message = f"unknown field{'s' if len(unknown) > 1 else ''}: {', '.join(name[:64] for name in unknown[:8])}"
        raise TrivetError(ErrorKind.INVALID_ARGUMENT, message, param=unknown[0][:64])
    logger.warning("a request has fields that nobody knows: %s", ", ".join(name[:64] for name in unknown[:8]))


def _explained(reason: str) -> TrivetError:
    """msgspec's words in the caller's: `Expected `int | null`, got `str` - at `$.seed`` reads "seed must be an integer, not a string"."""
    path = _PATH.search(reason)
    param = path["path"].lstrip(".").replace("[...]", "") if path else None
    bare = _PATH.sub("", reason)
    subject = param or "the body"
    if missing := _MISSING.match(bare):
        param = f"{param}.{missing['field']}" if param else missing["field"]
        message = f"{param} is required"
    elif mismatch := _MISMATCH.match(bare):
        expected = " or ".join(_TYPE_NAMES.get(name, name) for name in mismatch["expected"].split(" | ") if name != "null")
        message = f"{subject} must be {expected}, not {_TYPE_NAMES.get(mismatch['got'], mismatch['got'])}"
    else:
        message = f"{subject}: {bare[:1].lower()}{bare[1:]}"
    # The name of the field that a client sets; which entry of a list it was is in the message.
    return TrivetError(ErrorKind.INVALID_ARGUMENT, message, param=param.split("[")[0] if param else None)
