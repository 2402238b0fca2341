"""`LLM`: a model in the caller's own program, without a server: prompts in, whole answers out.

The class blocks its caller and owns nothing but the thread in which the engine and its frontend live (`trivet.offline`). It renders no
chats.
"""

import os
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Literal

from trivet_chassis.logging import LogLevel
from trivet_frontend.offline import Batch, RequestOutput, SamplingParams
from trivet_proto.errors import TrivetError

from trivet.offline.answering import answer
from trivet.offline.choosing import child_processes, this_process
from trivet.offline.settings import in_keywords, load_offline_settings

Prompts = str | Sequence[int] | Iterable[str | Sequence[int]]


class LLM:
    """A model that is ready when this returns, until `close`, the end of a `with` block, or the end of the program.

    Scheduler and worker run as child processes, as under `trivet serve`; with `inprocess` in this one, which brings in torch. The other
    keywords are the flags of `trivet serve` and, under their own names, the further settings of worker and scheduler. What none says
    comes from where it does there.

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
        batch_invariant: Literal["auto", "on", "off"] | bool | None = None,
        logits_processors: tuple[str, ...] | None = None,
        workers: int | None = None,
        policy: str | None = None,
        enable_prefix_caching: bool | None = None,
        generation_config: Literal["auto", "neutral"] | None = None,
        startup_timeout: float | None = None,
        progress: bool = True,
        log_level: LogLevel = "warning",
        **own_settings: object,
    ) -> None:
        """`progress`: whether the start is shown on a terminal; `config`: a TOML file as of `trivet serve --config`.

        `own_settings` are those of a worker or a scheduler that `trivet serve` has no flags for, such as `run_ahead`; others are refused.
        """
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
                own_settings,
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
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        progress: bool = True,
        concurrency: int | None = None,
    ) -> list[RequestOutput]:
        """Answer `prompts`, each a text or a list (an array) of token ids, in their order; one alone needs no list.

        `sampling_params` are for all of them, or a list with one for each; none: the model's own. `progress` shows a bar on a terminal.
        At most `concurrency` prompts are with the engine at one time; none: as many as it takes.

        A prompt that fails has its error in its output, and the others go on; where all fail, the first one's `TrivetError` is raised.
        """
        batch = Batch(prompts, sampling_params)
        outputs = answer(self._engine, batch, concurrency=concurrency, progress=progress)
        if outputs and all(output.error is not None for output in outputs):
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
