"""The text of one choice, token by token: whole characters only, stop strings found wherever they lie.

While a stop string may still be beginning, at most (longest stop - 1) characters are held back; when the stop string is to be part of the
output nothing is. A token leaves with the first of its characters, so what a client has in text, it has in ids, and ids run ahead of the
text by at most the rest of one token. A token without text leaves once the text before it has. At the end everything leaves up to the
token that completed the stop string. Of several stop strings the one that completes first wins. A character that the prompt began belongs
to the prompt: the tokens that complete it, or fail to, give no text for it.
"""

import codecs
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from trivet_frontend.text.token_bytes import TokenBytes


class Release(NamedTuple):
    """Text that may leave, and how many of the tokens pushed so far leave with it.

    `stop` is the stop string that ended the text; tokens after the one that completed it never leave.
    """

    text: str
    tokens: int
    stop: str | None = None


class IncrementalText:
    """Owns the text not yet released and where each token lies in it."""

    def __init__(
        self,
        token_bytes: TokenBytes,
        *,
        stops: Sequence[str],
        include_stop: bool,
        skip_special_tokens: bool,
        min_tokens: int,
        prompt_tail: bytes = b"",
    ) -> None:
        """`prompt_tail` is what `TokenBytes.unfinished` says of the prompt."""
        self._token_bytes = token_bytes
        self._stops = tuple(stops)
        self._include_stop = include_stop
        self._skip_special_tokens = skip_special_tokens
        self._min_tokens = min_tokens
        self._hold = max(map(len, stops), default=1) - 1 if not include_stop else 0
        self._longest = max(map(len, stops), default=0)
        # The bytes of a character that is not whole yet; the prompt may have begun the first.
        self._unfinished = prompt_tail
        self._in_prompt_character = bool(prompt_tail)
        # The whole text, of which `_sent` characters have left; a stop string may begin in what has left already when it is to be included.
        self._text = ""
        self._sent = 0
        self._searchable_from = 0
        self._tokens_seen = 0
        # Where the text of each token that has not left begins and ends.
        self._spans: deque[tuple[int, int]] = deque()

    def push(self, token_ids: Sequence[int], *, finished: bool, stop_token: bool) -> Release:
        """Take tokens and say what may leave; with `stop_token` the last of them ended the choice and gives no text unless asked for."""
        last = len(token_ids) - 1
        for place, token_id in enumerate(token_ids):
            is_last = place == last
            silent = stop_token and is_last and not self._include_stop
            content = b"" if silent else self._token_bytes.of(token_id, skip_special_tokens=self._skip_special_tokens)
            before = len(self._text)
            self._text += self._decoded(content, final=finished and is_last)
            self._tokens_seen += 1
            # A token that ends inside a character reaches into the next one.
            self._spans.append((before, len(self._text) + (1 if self._unfinished else 0)))
            if self._stops and (release := self._stopped(before)) is not None:
                return release
        if finished and not token_ids:
            self._text += self._decoded(b"", final=True)
        if finished:
            return self._release(len(self._text), tokens=len(self._spans))
        return self._release_within(len(self._text) - self._hold)

    def _decoded(self, content: bytes, *, final: bool) -> str:
        content = self._unfinished + content
        text, read = codecs.utf_8_decode(content, "replace", final)
        self._unfinished = content[read:]
        if self._in_prompt_character and text:
            self._in_prompt_character = False
            return text[1:]
        return text

    def _stopped(self, before: int) -> Release | None:
        """The release that ends the choice if a stop string was completed by the text from `before` on."""
        if self._tokens_seen <= self._min_tokens:
            self._searchable_from = len(self._text)
            return None
        start = max(self._searchable_from, before - self._longest + 1)
        found = [(place + len(stop), stop) for stop in self._stops if (place := self._text.find(stop, start)) >= 0]
        if not found:
            return None
        end, stop = min(found)
        return self._release(end if self._include_stop else end - len(stop), tokens=len(self._spans), stop=stop)

    def _release_within(self, limit: int) -> Release:
        """The text up to `limit`, with every token that has a character in it or ends before it."""
        length = max(limit, self._sent)
        if self._spans and self._spans[-1][1] <= length:
            return self._release(length, tokens=len(self._spans))
        tokens = 0
        for begin, end in self._spans:
            if begin >= length and end > length:
                break
            tokens += 1
        return self._release(length, tokens=tokens)

    def _release(self, length: int, *, tokens: int, stop: str | None = None) -> Release:
        text, self._sent = self._text[self._sent : length], max(length, self._sent)
        if tokens == len(self._spans):
            self._spans.clear()
        else:
            for _ in range(tokens):
                self._spans.popleft()
        return Release(text, tokens, stop)
