"""Prompts that end inside the last message, for an answer that continues it.

Where the message ends in the rendered text is found by a mark behind its content, not by searching for the content, which may be anywhere.
Pure functions; the caller's messages are left as they are.
"""

from typing import Any

from trivet_proto.errors import invalid

# The space at its end tells whether the template trims content.
_MARK = "\x02TRIVET-CONTINUES-HERE\x03 "


def with_continuation_mark(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with the mark behind the last text; raises INVALID_ARGUMENT when there is no text to continue."""
    content = messages[-1]["content"] if messages else ""
    if not content or (isinstance(content, list) and not content[-1]["text"]):
        raise invalid("continue_final_message needs a last message with content", "messages")
    marked: Any = content + _MARK if isinstance(content, str) else [*content[:-1], content[-1] | {"text": content[-1]["text"] + _MARK}]
    return [*messages[:-1], messages[-1] | {"content": marked}]


def cut_at_continuation_mark(rendered: str) -> str:
    """What was rendered before the mark; without the white space at its end when the template trims content."""
    place = rendered.rfind(_MARK.strip())
    if place < 0:
        raise invalid("continue_final_message: the chat template does not show the last message as it is", "continue_final_message")
    before = rendered[:place]
    return before if rendered.startswith(_MARK, place) else before.rstrip()
