"""What may be taken as a caller's request id: it is echoed into headers and written into logs, so it may hold nothing that means
something there.

Requests are never told apart by it: a caller may send the same id twice.
"""

import re
import uuid

LONGEST_REQUEST_ID = 128

_VALID = re.compile(rf"[A-Za-z0-9._~:/+=@-]{{1,{LONGEST_REQUEST_ID}}}")


def accepted_request_id(given: str) -> str:
    """`given` if it is a valid id, else a fresh one."""
    return given if _VALID.fullmatch(given) else uuid.uuid4().hex
