"""What a child writes arrives in whole lines, whatever the pieces."""

import asyncio
import os

from hypothesis import given
from hypothesis import strategies as st
from trivet.launch.child_log import KEPT_LINES, LONGEST_LINE, ChildLog

pieces = st.lists(st.binary(max_size=12).map(lambda piece: piece.replace(b"x", b"\n")), max_size=12)


def passed_on(written: list[bytes]) -> tuple[list[bytes], list[str]]:
    async def write() -> tuple[list[bytes], list[str]]:
        lines: list[bytes] = []
        log = ChildLog(lines.append)
        for piece in written:
            os.write(log.write_end, piece)
            await asyncio.sleep(0)  # lets the log read now and then
        log.child_has_it()
        log.finish()
        return lines, log.last_lines(KEPT_LINES)

    return asyncio.run(write())


@given(pieces)
def test_all_that_is_written_arrives_line_by_line(written: list[bytes]) -> None:
    lines, kept = passed_on(written)
    text = b"".join(written)
    assert b"".join(lines) == (text if not text or text.endswith(b"\n") else text + b"\n")
    assert all(line.count(b"\n") == 1 for line in lines)
    assert len(kept) == len(lines)


def test_a_line_without_an_end_does_not_grow_for_ever() -> None:
    lines, _ = passed_on([b"a" * (LONGEST_LINE // 4)] * 9)
    assert max(len(line) for line in lines) <= 2 * LONGEST_LINE + 1
    assert sum(line.count(b"a") for line in lines) == LONGEST_LINE // 4 * 9


def test_only_the_last_lines_are_kept() -> None:
    _, kept = passed_on([b"%d\n" % number for number in range(KEPT_LINES + 10)])
    assert len(kept) == KEPT_LINES
    assert kept[-1] == str(KEPT_LINES + 9)
