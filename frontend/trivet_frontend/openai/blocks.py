"""Pieces of answers that chat and completions share: usage, logprobs, prompt logprobs."""

from collections.abc import Sequence

from trivet_frontend.openai.responses import (
    ChatLogprobs,
    ChatTokenLogprob,
    ChatTopLogprob,
    CompletionLogprobs,
    PromptLogprobBlock,
    PromptLogprobs,
    PromptTokensDetails,
    UsageBlock,
)
from trivet_frontend.serving import TokenLogprob, Usage


def usage_block(usage: Usage) -> UsageBlock:
    return UsageBlock(
        usage.prompt_tokens,
        usage.completion_tokens,
        usage.prompt_tokens + usage.completion_tokens,
        PromptTokensDetails(usage.cached_tokens),
    )


def chat_logprobs(rows: Sequence[TokenLogprob] | None) -> ChatLogprobs | None:
    if rows is None:
        return None
    return ChatLogprobs(
        [
            ChatTokenLogprob(
                row.token,
                row.logprob or 0.0,
                list(row.token_bytes),
                [ChatTopLogprob(top.token, top.logprob or 0.0, list(top.token_bytes)) for top in row.top],
            )
            for row in rows
        ]
    )


def completion_logprobs(rows: Sequence[TokenLogprob] | None, *, offset: int) -> CompletionLogprobs | None:
    """The legacy form; `offset` is where in the choice's text the first token begins, in characters."""
    if rows is None:
        return None
    block = CompletionLogprobs([], [], [], [])
    for row in rows:
        block.tokens.append(row.token)
        block.token_logprobs.append(row.logprob)
        if row.logprob is None:
            block.top_logprobs.append(None)
        else:
            # The token itself is always among them, also when it is not one of the most probable.
            block.top_logprobs.append({top.token: top.logprob or 0.0 for top in row.top} | {row.token: row.logprob})
        block.text_offset.append(offset)
        offset += len(row.token)
    return block


def prompt_logprobs(rows: Sequence[TokenLogprob | None]) -> PromptLogprobs:
    """vLLM's form: per prompt token a table from token id, the token itself among them; null for the first."""
    return [
        None
        if row is None
        else {entry.token_id: PromptLogprobBlock(entry.logprob or 0.0, entry.rank, entry.token) for entry in (*row.top, row)}
        for row in rows
    ]
