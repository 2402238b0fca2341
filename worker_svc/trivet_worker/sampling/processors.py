"""Custom logits processors: code of a user's own that changes the logits of requests it takes, in every step.

A class is named by a setting (`package.module:Class`), made once when the model is loaded, told which requests come and go, and handed the
rows of those it took. What it raises ends the requests it was handed, each with a flag, and nothing else. docs/logits-processors.md has
an example.
"""

import importlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from trivet_kernels.cpu.sampling import SamplingRows
from trivet_proto.errors import invalid
from trivet_proto.v1 import types_pb2, worker_pb2

logger = logging.getLogger(__name__)

FLAG_PROCESSOR_FAILED = worker_pb2.ROW_FLAG_PROCESSOR_FAILED
SETTING = "logits_processors"


@dataclass(frozen=True, slots=True)
class ArrivingRequest:
    """A request before its first step. `arguments` is what it brought for processors, an empty mapping without any."""

    params: types_pb2.SamplingParams
    arguments: Mapping[str, Any]
    token_ids: NDArray[np.int32]  # prompt, then output so far: more than the prompt after a preemption
    num_prompt_tokens: int


@dataclass(frozen=True, slots=True)
class BatchChange:
    """Since the last step. A slot is a request's number from its arrival to its end; then another has it."""

    added: tuple[tuple[int, ArrivingRequest], ...]
    removed: tuple[int, ...]  # before the additions


@dataclass(frozen=True, slots=True)
class ProcessedRow:
    """One row that a processor is handed."""

    slot: int
    prompt: NDArray[np.int32]
    output: NDArray[np.int32]


class LogitsProcessor(Protocol):
    """Made with the vocabulary's size. Called by one thread, in this order in each step: `takes`, `update`, `apply`."""

    is_argmax_invariant: bool
    """True: it never changes which token is the best, and runs after the temperature, on scores of which the best random one is 0."""

    def takes(self, request: ArrivingRequest) -> bool:
        """Whether this request is to be processed. What it raises ends the request."""
        ...

    def update(self, change: BatchChange) -> None:
        """Requests that it took have come, or have gone."""
        ...

    def apply(self, logits: torch.Tensor, rows: Sequence[ProcessedRow]) -> None:
        """Change float32 logits `[len(rows), vocabulary]` in place."""
        ...


def load_processors(names: Sequence[str], vocab_size: int) -> tuple[LogitsProcessor, ...]:
    """Raises INVALID_ARGUMENT naming the setting for one that cannot be had."""
    return tuple(_load(name, vocab_size) for name in names)


def _load(name: str, vocab_size: int) -> LogitsProcessor:
    module_name, _, class_name = name.partition(":")
    if not module_name or not class_name:
        raise invalid(f"{SETTING}: {name!r} is no name of a class; package.module:Class is right", SETTING)
    try:
        made: Any = getattr(importlib.import_module(module_name), class_name)(vocab_size)
    except Exception as error:
        raise invalid(
            f"{SETTING}: {name} could not be made: {type(error).__name__}: {error}. The module must be importable where the worker runs "
            "(PYTHONPATH), and the class take the vocabulary's size",
            SETTING,
        ) from error
    lacking = [member for member in ("is_argmax_invariant", "takes", "update", "apply") if not hasattr(made, member)]
    if lacking:
        raise invalid(f"{SETTING}: {name} has no {', '.join(lacking)}; docs/logits-processors.md says what one needs", SETTING)
    logger.info("logits processor %s runs", name)
    processor: LogitsProcessor = made
    return processor


class ActiveProcessors:
    """The processors of a worker, and which slots each has taken."""

    def __init__(self, processors: Sequence[LogitsProcessor], capacity: int) -> None:
        self._processors = tuple(processors)
        self._acts = np.zeros((len(self._processors), capacity), dtype=np.bool_)
        self._is_refused = np.zeros(capacity, dtype=np.bool_)  # one of them failed on it
        self._added: list[dict[int, ArrivingRequest]] = [{} for _ in self._processors]
        self._removed: list[list[int]] = [[] for _ in self._processors]

    def add(self, slot: int, request: worker_pb2.NewRequest, token_ids: NDArray[np.int32]) -> None:
        """A request comes into a slot that is free."""
        if not self._processors:
            return
        try:
            arriving = ArrivingRequest(request.sampling, _arguments(request.sampling), token_ids, request.num_prompt_tokens)
            takes = [processor.takes(arriving) for processor in self._processors]
        except Exception as error:
            self._refuse(slot, "takes", error)
            return
        for index, is_taken in enumerate(takes):
            if is_taken:
                self._acts[index, slot] = True
                self._added[index][slot] = arriving

    def remove(self, slot: int) -> None:
        """Whatever is there ends."""
        self._is_refused[slot] = False
        for index in np.flatnonzero(self._acts[:, slot]).tolist():
            self._acts[index, slot] = False
            if self._added[index].pop(slot, None) is None:  # else it never heard of the request
                self._removed[index].append(slot)

    def act_on(self, slots: NDArray[np.int64]) -> bool:
        return bool(self._processors) and bool(self._acts[:, slots].any() or self._is_refused[slots].any())

    def apply(self, logits: torch.Tensor, rows: SamplingRows, flags: NDArray[np.uint8], *, is_argmax_invariant: bool) -> None:
        """Those of one kind, on the rows that each has taken; rows that one fails on are flagged."""
        flags[self._is_refused[rows.slots]] = FLAG_PROCESSOR_FAILED
        for index, processor in enumerate(self._processors):
            if processor.is_argmax_invariant != is_argmax_invariant:
                continue
            taken = np.flatnonzero(self._acts[index, rows.slots] & (flags == 0))
            try:
                self._notify(index, processor)
                if not taken.size:
                    continue
                chosen = torch.from_numpy(taken)
                changed = logits[chosen]
                processor.apply(changed, [_processed_row(rows, row) for row in taken.tolist()])
                logits[chosen] = changed
            except Exception as error:
                flags[taken] = FLAG_PROCESSOR_FAILED
                for slot in rows.slots[taken].tolist():
                    self._refuse(slot, type(processor).__name__, error)

    def _notify(self, index: int, processor: LogitsProcessor) -> None:
        added, removed = self._added[index], self._removed[index]
        if added or removed:
            self._added[index], self._removed[index] = {}, []
            processor.update(BatchChange(tuple(added.items()), tuple(removed)))

    def _refuse(self, slot: int, where: str, error: Exception) -> None:
        self._is_refused[slot] = True
        logger.error("a logits processor failed (%s); its request ends", where, exc_info=error)


def _arguments(params: types_pb2.SamplingParams) -> Mapping[str, Any]:
    if not params.extra:
        return {}
    read: Any = json.loads(params.extra)
    if not isinstance(read, dict):
        raise TypeError(f"a request's arguments for processors are {type(read).__name__}; a JSON object is right")
    return read


def _processed_row(rows: SamplingRows, row: int) -> ProcessedRow:
    slot, prompt = int(rows.slots[row]), int(rows.prompt_lengths[row])
    ids = rows.token_ids[slot, : rows.lengths[row]]
    return ProcessedRow(slot, ids[:prompt], ids[prompt:])
