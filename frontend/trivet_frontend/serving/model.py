"""A model's language out of its bundle: tokenizer, template, text. Owns the threads that tokenize.

Tokenizing and rendering run in these threads, never on the event loop; what a token's text is costs a look-up.
"""

import asyncio
import contextvars
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from tokenizers import Tokenizer
from trivet_checkpoint import ModelBundle
from trivet_checkpoint.bundle import CHAT_TEMPLATE, CHAT_TEMPLATE_PLACE, TOKENIZER_CONFIG
from trivet_proto.errors import TrivetError, invalid

from trivet_frontend.chat import compiled, cut_at_continuation_mark, normalised_messages, render, template_traits, with_continuation_mark
from trivet_frontend.engine import ModelDescription, TokenLogprobs
from trivet_frontend.serving.options import ChatInput, GenerationOptions
from trivet_frontend.serving.outcome import TokenLogprob
from trivet_frontend.serving.sampling import MAX_CHARACTERS_PER_TOKEN, check_text
from trivet_frontend.text import IncrementalText, TokenBytes

ResultT = TypeVar("ResultT")

TOKENIZER_FILE = "tokenizer.json"
# Shorter texts are tokenized sooner than a thread has begun.
INLINE_CHARACTERS = 512
# A rendered text over the text limit is refused by its length; a template that writes far more is stopped while it writes.
RENDERED_PER_TEXT_LIMIT = 4


class ModelLanguage:
    """Text to tokens and back, for one model."""

    def __init__(
        self, bundle: ModelBundle, model: ModelDescription, *, template: str | None, allow_request_template: bool, threads: int
    ) -> None:
        """`template` has been read and is one; None: the model's own. Raises INVALID_ARGUMENT naming what of the bundle cannot be read."""
        try:
            self._tokenizer = Tokenizer.from_str(bundle.files[TOKENIZER_FILE].decode())
        except Exception as error:  # tokenizers raises Exception itself
            raise invalid(f"the tokenizer of {model.name} (tokenizer.json) cannot be read: {error}; mend or replace it there") from error
        config = bundle.json(TOKENIZER_CONFIG)
        self._special_texts = {name: config.get(name) or "" for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
        self._bytes = TokenBytes(self._tokenizer, bundle.files[TOKENIZER_FILE])
        self._template = template if template is not None else _own_template(bundle, model)
        self._allow_request_template = allow_request_template
        self._max_model_len = model.max_model_len
        self._pool = ThreadPoolExecutor(threads or os.cpu_count() or 1, thread_name_prefix="tokenizer")

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return await self._run(lambda: self._ids(text, add_special_tokens=add_special_tokens), inline=len(text) <= INLINE_CHARACTERS)

    async def encode_chat(self, chat: ChatInput) -> list[int]:
        template = self._template_for(chat)
        if chat.continue_final_message and chat.add_generation_prompt:
            raise invalid("continue_final_message and add_generation_prompt exclude each other", "continue_final_message")

        def work() -> list[int]:
            messages = normalised_messages(chat.messages, template_traits(template))
            if chat.continue_final_message:
                messages = with_continuation_mark(messages)
            text = render(
                template,
                {
                    **self._special_texts,
                    **(chat.chat_template_kwargs or {}),
                    **({"reasoning_effort": chat.reasoning_effort} if chat.reasoning_effort else {}),
                    "messages": messages,
                    "tools": chat.tools,
                    "documents": chat.documents,
                    "add_generation_prompt": chat.add_generation_prompt is not False and not chat.continue_final_message,
                },
                most_characters=RENDERED_PER_TEXT_LIMIT * MAX_CHARACTERS_PER_TOKEN * self._max_model_len,
            )
            if chat.continue_final_message:
                text = cut_at_continuation_mark(text)
            check_text(text, param="messages", max_model_len=self._max_model_len)
            return self._ids(text, add_special_tokens=bool(chat.add_special_tokens))

        token_ids = await self._run(work, inline=False)
        if not token_ids:
            raise invalid("messages render to no tokens", "messages")
        return token_ids

    async def bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Each word as it stands at the beginning and after a space."""

        def work() -> tuple[tuple[int, ...], ...]:
            sequences: dict[tuple[int, ...], None] = {}
            for word in words:
                for form in (word.lstrip(" "), " " + word.lstrip(" ")):
                    token_ids = tuple(self._ids(form, add_special_tokens=False))
                    if not token_ids:
                        raise invalid(f"bad_words has {word!r}, which has no tokens", "bad_words")
                    sequences[token_ids] = None
            return tuple(sequences)

        return await self._run(work, inline=False)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return self._bytes.joined(token_ids, skip_special_tokens=skip_special_tokens)

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        return [self._bytes.text_of(token_id) for token_id in token_ids]

    def output_text(self, prompt_ids: Sequence[int], options: GenerationOptions) -> IncrementalText:
        return IncrementalText(
            self._bytes,
            stops=options.stop,
            include_stop=options.include_stop_str_in_output,
            skip_special_tokens=options.skip_special_tokens,
            min_tokens=options.min_tokens or 0,
            prompt_tail=self._bytes.unfinished(prompt_ids),
        )

    def describe_logprobs(self, rows: TokenLogprobs, top: int) -> list[TokenLogprob]:
        return [
            self._described(ids[0], values[0], rank, tuple(zip(ids[1 : 1 + top], values[1 : 1 + top], strict=True)))
            for ids, values, rank in zip(rows.token_ids, rows.values, rows.ranks, strict=True)
        ]

    def _described(self, token_id: int, value: float, rank: int, rivals: tuple[tuple[int, float], ...]) -> TokenLogprob:
        top = tuple(
            TokenLogprob(self._bytes.text_of(rival), rival, logprob, place, self._bytes.of(rival))
            for place, (rival, logprob) in enumerate(rivals, start=1)
        )
        return TokenLogprob(self._bytes.text_of(token_id), token_id, value, rank, self._bytes.of(token_id), top)

    def _template_for(self, chat: ChatInput) -> str:
        if chat.chat_template is not None:
            if not self._allow_request_template:
                raise invalid("chat_template of a request is not allowed here", "chat_template")
            return chat.chat_template
        if self._template is None:
            raise invalid("this model has no chat template; use completions, or start the server with one", "messages")
        return self._template

    def _ids(self, text: str, *, add_special_tokens: bool) -> list[int]:
        # Only this form leaves out where in the text each token stands, a seventh of the work.
        ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    async def _run(self, work: Callable[[], ResultT], *, inline: bool) -> ResultT:
        if inline:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._pool, contextvars.copy_context().run, work)


def _own_template(bundle: ModelBundle, model: ModelDescription) -> str | None:
    template = bundle.chat_template
    if template is not None:
        place = bundle.json(TOKENIZER_CONFIG).get(CHAT_TEMPLATE_PLACE, CHAT_TEMPLATE)
        try:
            compiled(template, called=f"the chat template of {model.name} ({place})")
        except TrivetError as error:
            raise invalid(f"{error.message}; mend it there, or set chat_template to a file with another", error.param) from None
    return template
