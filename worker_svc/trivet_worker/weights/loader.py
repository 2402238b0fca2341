"""Filling a model from a checkpoint, one tensor at a time on each core, so that weights are never twice in memory.

Every tensor the model needs must be there, in the right shape, or the start ends with its name; nothing is left at random. Tensors that the
model does not need are counted and named in the log.
"""

import logging
import re
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import groupby
from typing import Literal

import numpy as np
import torch
from trivet_checkpoint import Checkpoint
from trivet_proto.errors import ErrorKind, TrivetError

from trivet_worker.weights.placement import BlockTarget, NeededTensor, Placement

logger = logging.getLogger(__name__)

LoadFormat = Literal["auto", "dummy"]
Progress = Callable[[int, int], None]  # bytes done, bytes in all

ROPE_FACTORS = "model.rope_factors"
TIED_HEAD = "lm_head.weight"
IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)
DUMMY_SCALE = 0.02


def load_weights(checkpoint: Checkpoint, placements: Sequence[Placement], progress: Progress) -> None:
    """Raises FAILED_PRECONDITION naming the tensor that is missing or has another shape."""
    check_tensors(checkpoint, (NeededTensor(place.name, tuple(place.target.shape)) for place in placements))
    total = sum(checkpoint.tensors[place.name].size for place in placements)
    done = 0
    # Tensors of one layer may lie in one packed weight, side by side within a byte: one thread's.
    groups = [list(group) for _, group in groupby(placements, key=lambda place: _layer_of(place.name))]
    with ThreadPoolExecutor(torch.get_num_threads(), thread_name_prefix="loading") as pool:
        filling = [pool.submit(_load, checkpoint, group) for group in groups]
        try:
            for filled in as_completed(filling):
                done += filled.result()
                progress(done, total)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    _report_unused(checkpoint, placements)


def fill_dummy(placements: Sequence[Placement], seed: int = 0) -> None:
    """Small random weights, for measurements without a checkpoint's content."""
    generator = torch.Generator().manual_seed(seed)
    for place in placements:
        if len(place.target.shape) == 1:
            place.target.copy_(torch.ones(place.target.shape[0]))
        else:
            place.target.copy_(torch.randn(tuple(place.target.shape), generator=generator) * DUMMY_SCALE)


def rope_factors(checkpoint: Checkpoint) -> torch.Tensor | None:
    return torch.from_numpy(checkpoint.load(ROPE_FACTORS)) if ROPE_FACTORS in checkpoint.tensors else None


def _layer_of(name: str) -> str:
    """The part of a tensor's name that numbers its layer; the whole name of one outside the layers."""
    numbered = re.match(r".*?\.\d+\.", name)
    return name if numbered is None else numbered[0]


def _load(checkpoint: Checkpoint, placements: Sequence[Placement]) -> int:
    """The stored bytes that it put in place."""
    for place in placements:
        kind = checkpoint.record(place.name).kind
        if isinstance(place.target, BlockTarget) and place.target.takes_blocks(kind):
            place.target.copy_blocks(torch.from_numpy(np.array(checkpoint.stored_rows(place.name))), kind)
        else:
            place.target.copy_(torch.from_numpy(checkpoint.load(place.name)))
    return sum(checkpoint.tensors[place.name].size for place in placements)


def check_tensors(checkpoint: Checkpoint, needed: Iterable[NeededTensor]) -> None:
    """Raises FAILED_PRECONDITION naming the first tensor that is missing or has another shape; no more of `needed` is asked for then."""
    for tensor in needed:
        record = checkpoint.tensors.get(tensor.name)
        if record is None:
            layers = f" (num_hidden_layers is {checkpoint.config['num_hidden_layers']})" if ".layers." in tensor.name else ""
            raise TrivetError(
                ErrorKind.FAILED_PRECONDITION,
                f"{checkpoint.path}: the tensor {tensor.name} is missing{layers}; the checkpoint is incomplete or of another architecture",
            )
        if record.shape != tensor.shape:
            raise TrivetError(
                ErrorKind.FAILED_PRECONDITION,
                f"{checkpoint.path}: tensor {tensor.name} has the shape {list(record.shape)}, the model needs {list(tensor.shape)}",
            )


def _report_unused(checkpoint: Checkpoint, placements: Sequence[Placement]) -> None:
    used = {place.name for place in placements} | {ROPE_FACTORS}
    unused = [name for name in checkpoint.tensors if name not in used and not name.endswith(IGNORED_SUFFIXES)]
    if TIED_HEAD in unused and checkpoint.config.get("tie_word_embeddings"):
        unused.remove(TIED_HEAD)
        _warn_of_other_head(checkpoint)
    if unused:
        logger.warning("%d tensors of the checkpoint are not used, among them %s", len(unused), ", ".join(unused[:3]))


def _warn_of_other_head(checkpoint: Checkpoint) -> None:
    """The config says tied; a head of its own that differs is a checkpoint at odds with itself."""
    embedding, head = checkpoint.load("model.embed_tokens.weight"), checkpoint.load(TIED_HEAD)
    if embedding.shape != head.shape or not bool((embedding == head).all()):
        logger.warning("config.json says tie_word_embeddings, but lm_head.weight differs from the embedding: the embedding is used")
