"""`LLM`: a model in the caller's own program, without a server: prompts in, whole answers out.

The class blocks its caller and owns nothing but the thread in which the engine and its frontend live (`trivet.offline`). It renders no
chats.
"""

import concurrent.futures
import os
import weakref
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Literal

from trivet_chassis.logging import LogLevel
from trivet_frontend.offline import Batch, Prompt, RequestOutput, SamplingParams
from trivet_proto.errors import TrivetError, invalid

from trivet.offline.choosing import child_processes, this_process
from trivet.offline.progress_bar import wait_with_progress
from trivet.offline.settings import in_keywords, load_offline_settings

Prompts = str | list[int] | Sequence[str | list[int]]


class LLM:
    """A model that is ready when this returns, until `close`, the end of a `with` block, or the end of the program.

    Scheduler and worker run as child processes, as under `trivet serve`; with `inprocess` in this one, which brings in torch. The other
    keywords are the flags of `trivet serve`, and what none says comes from where it does there.

    Raises `TrivetError`, with nothing left running, for settings that are not served: its message says what would be.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        inprocess: bool = False,
        config: str | Path | None = None,
        dtype: Literal["auto", "float32", "bfloat16"] | None = None,
        kv_dtype: str | None = None,
        quantization: str | None = None,
        load_format: str | None = None,
        max_model_len: int | None = None,
        block_size: int | None = None,
        num_kv_blocks: int | None = None,
        kv_cache_memory: int | str | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        threads: int | None = None,
        attention_backend: str | None = None,
        batch_invariant: Literal["auto", "on", "off"] | None = None,
        logits_processors: tuple[str, ...] | None = None,
        workers: int | None = None,
        policy: str | None = None,
        enable_prefix_caching: bool | None = None,
        generation_config: Literal["auto", "neutral"] | None = None,
        startup_timeout: float | None = None,
        progress: bool = True,
        log_level: LogLevel = "warning",
    ) -> None:
        """`progress`: whether the start is shown on a terminal; `config`: a TOML file as of `trivet serve --config`."""
        environ = dict(os.environ)
        try:
            settings = load_offline_settings(
                {
                    "model": model,
                    "config": config,
                    "dtype": dtype,
                    "kv_dtype": kv_dtype,
                    "quantization": quantization,
                    "load_format": load_format,
                    "max_model_len": max_model_len,
                    "block_size": block_size,
                    "num_kv_blocks": num_kv_blocks,
                    "kv_cache_memory": kv_cache_memory,
                    "max_num_seqs": max_num_seqs,
                    "max_num_batched_tokens": max_num_batched_tokens,
                    "threads": threads,
                    "attention_backend": attention_backend,
                    "batch_invariant": batch_invariant,
                    "logits_processors": logits_processors,
                    "workers": workers,
                    "policy": policy,
                    "enable_prefix_caching": enable_prefix_caching,
                    "generation_config": generation_config,
                    "startup_timeout": startup_timeout,
                    "log_level": log_level,
                },
                environ,
            )
            engine = this_process(settings, environ) if inprocess else child_processes(settings, environ, shows_start=progress)
            engine.start()
        except TrivetError as error:
            raise in_keywords(error) from None
        self._engine = engine
        # Also when this object is thrown away, and when the interpreter ends; without a reference to it.
        self._finalizer = weakref.finalize(self, engine.stop)

    def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
        concurrency: int | None = None,
    ) -> list[RequestOutput]:
        """Answer `prompts`, each a text or a list of token ids, in their order.

        `sampling_params` are for all of them, or a list with one for each; none: the model's own. `progress` shows a bar on a terminal.
        At most `concurrency` prompts are with the engine at one time; none: as many as it takes.

        A prompt that fails has its error in its output, and the others go on; where all fail, the first one's `TrivetError` is raised.
        """
        batch = Batch(*_paired(prompts, sampling_params))
        if concurrency is not None and concurrency < 1:
            raise invalid(f"concurrency: {concurrency} is below 1", "concurrency")
        if not batch.size:
            return []
        future = self._engine.submit(lambda inference: batch.run(inference, at_once=concurrency or inference.max_requests))
        try:
            outputs = wait_with_progress(future, batch) if progress else future.result()
        except concurrent.futures.CancelledError:
            raise self._engine.why_it_ended() from None
        except BaseException:
            future.cancel()  # Ctrl-C: what is with the engine is given up
            raise
        if all(output.error is not None for output in outputs):
            assert outputs[0].error is not None
            raise outputs[0].error
        return outputs

    def close(self) -> None:
        """End what runs and wait until nothing is left of it. A second call does nothing."""
        self._finalizer()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _paired(prompts: Prompts, params: SamplingParams | Sequence[SamplingParams] | None) -> tuple[list[Prompt], list[SamplingParams]]:
    """A list of prompts and one of as many parameters. What is no prompt is refused with its own request."""
    is_one = isinstance(prompts, str) or (bool(prompts) and isinstance(prompts[0], int))
    listed: list[Prompt] = [prompts] if is_one else list(prompts)  # type: ignore[list-item, arg-type]
    if params is None or isinstance(params, SamplingParams):
        return listed, [params or SamplingParams()] * len(listed)
    if len(params) != len(listed):
        raise invalid(f"sampling_params: {len(params)} for {len(listed)} prompts; give one for all, or one for each", "sampling_params")
    return listed, list(params)
