"""A model in one setting of the worker, asked for the logits of every token of some windows at once. Needs torch."""

from collections.abc import Sequence

import msgspec
import torch
from trivet_chassis.settings import load_settings
from trivet_kernels.api import PagedBatch
from trivet_proto.errors import invalid
from trivet_proto.v1 import types_pb2
from trivet_worker.attention.caches import LAYER_OUTERMOST, allocate_caches
from trivet_worker.config import WorkerSettings
from trivet_worker.forward_context import ForwardContext, forward_context
from trivet_worker.loading import prepare_model

WINDOW = 512
"""Tokens that are read together; the first has no context, the last has 511 before it."""

BLOCK = 16


def parse_setting(text: str, model: str, threads: int | None) -> WorkerSettings:
    """`DTYPE`, then perhaps a quantisation, then any other settings of the worker, joined by `+`. Raises `TrivetError`.

    Such as `bfloat16`, `bfloat16+gguf` and `bfloat16+attention_backend=torch`.
    """
    dtype, *others = text.split("+")
    words = [
        *([model] if model else []),
        f"--dtype={dtype}",
        f"--block-size={BLOCK}",
        *([] if threads is None else [f"--threads={threads}"]),
    ]
    known = {field.name for field in msgspec.structs.fields(WorkerSettings)}
    for other in others:
        name, equals, value = other.partition("=")
        if equals and name not in known:
            raise invalid(f"--settings {text}: {name} is no setting of the worker")
        words.append(f"--{name.replace('_', '-')}={value}" if equals else f"--quantization={other}")
    read = load_settings(WorkerSettings, section="worker", prog="--settings", description="", argv=words, environ={}).value
    return msgspec.structs.replace(read, max_num_batched_tokens=WINDOW, max_model_len=WINDOW)


def available(settings: Sequence[str]) -> list[str]:
    """Those of `settings` of which this worker has every setting that they name."""
    known = {field.name for field in msgspec.structs.fields(WorkerSettings)}
    return [text for text in settings if all(part.partition("=")[0] in known for part in text.split("+") if "=" in part)]


class Scorer:
    """Owns the model and its caches, which hold `windows` windows side by side."""

    def __init__(self, settings: WorkerSettings, windows: int = 1) -> None:
        """Raises `TrivetError` where the model cannot run so."""
        prepared = prepare_model(settings)
        self._operators = prepared.backend.operators
        self._model = prepared.fill()
        self._tables = torch.arange(1, windows * WINDOW // BLOCK + 1).view(windows, -1)
        blocks, layers = self._tables.numel() + 1, self._model.layer_caches()
        tensors = [
            types_pb2.KvCacheTensor(layers=[layer.layer], layout=LAYER_OUTERMOST, size_bytes=blocks * layer.page_bytes(BLOCK))
            for layer in layers
        ]
        self._caches = allocate_caches(types_pb2.KvCacheConfig(num_blocks=blocks, tensors=tensors), layers, BLOCK)

    def logits(self, ids: torch.Tensor, first: int = 0) -> torch.Tensor:
        """float32 `[W, n, vocabulary]` of token ids int64 `[W, n]` at positions from `first` on."""
        windows, count = ids.shape
        positions = torch.arange(first, first + count)
        slots = self._tables[:windows, positions // BLOCK] * BLOCK + positions % BLOCK
        batch = PagedBatch(
            query_starts=tuple(range(0, windows * count + 1, count)),
            seq_lens=(first + count,) * windows,
            seq_lens_tensor=torch.full((windows,), first + count),
            block_table=self._tables[:windows],
            slot_mapping=slots.reshape(-1),
            num_decodes=windows if count == 1 else 0,
        )
        rows = torch.arange(windows * count)
        with torch.inference_mode(), forward_context(ForwardContext(self._operators, batch, self._caches)):
            flat = self._model.step(ids.reshape(-1), positions.repeat(windows), rows, wants_hidden=False).logits
        return flat.view(windows, count, -1)
