"""Sampling in native code: whole batches of rows in one call, and log probabilities out of scores.

Arrays are the caller's; nothing here knows what a request is. What the numbers mean is in native/sampling.h.
"""

import ctypes
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from trivet_kernels.cpu.library import native_library

PHASE_CONSTRAIN, PHASE_SCALE, PHASE_CHOOSE = 1, 2, 4


class _Batch(ctypes.Structure):
    """`SamplingBatch` of native/sampling.h."""

    _fields_ = (
        ("rows", ctypes.c_int64),
        ("vocab", ctypes.c_int64),
        ("logits", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("lengths", ctypes.c_void_p),
        ("prompt_lengths", ctypes.c_void_p),
        ("token_ids", ctypes.c_void_p),
        ("token_stride", ctypes.c_int64),
        ("seeds", ctypes.c_void_p),
        ("temperature", ctypes.c_void_p),
        ("top_p", ctypes.c_void_p),
        ("top_k", ctypes.c_void_p),
        ("min_p", ctypes.c_void_p),
        ("presence", ctypes.c_void_p),
        ("frequency", ctypes.c_void_p),
        ("repetition", ctypes.c_void_p),
        ("min_tokens", ctypes.c_void_p),
        ("constraints", ctypes.c_void_p),
        ("tokens", ctypes.c_void_p),
        ("flags", ctypes.c_void_p),
        ("shifts", ctypes.c_void_p),
        ("phases", ctypes.c_int32),
        ("keeps_filtered", ctypes.c_int32),
    )


class _Request(ctypes.Structure):
    """`LogprobRequest` of native/sampling.h."""

    _fields_ = (
        ("rows", ctypes.c_int64),
        ("vocab", ctypes.c_int64),
        ("scores", ctypes.c_void_p),
        ("chosen", ctypes.c_void_p),
        ("widths", ctypes.c_void_p),
        ("wanted", ctypes.c_void_p),
        ("is_wanted", ctypes.c_void_p),
        ("is_plain", ctypes.c_void_p),
        ("shift", ctypes.c_void_p),
        ("token_ids", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("ranks", ctypes.c_void_p),
    )


@dataclass(frozen=True, slots=True)
class SamplingColumnArrays:
    """By slot, `[slots]`, contiguous. `constraints` are addresses of packed int32 arrays that the caller keeps alive; 0: none."""

    seeds: NDArray[np.uint64]
    temperature: NDArray[np.float32]
    top_p: NDArray[np.float32]
    top_k: NDArray[np.int64]
    min_p: NDArray[np.float32]
    presence: NDArray[np.float32]
    frequency: NDArray[np.float32]
    repetition: NDArray[np.float32]
    min_tokens: NDArray[np.int32]
    constraints: NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """The rows of a step: which slots they are of, how far those are, and every slot's ids `[slots, longest]`."""

    slots: NDArray[np.int64]  # [R]
    lengths: NDArray[np.int64]  # [R]
    prompt_lengths: NDArray[np.int64]  # [R]
    token_ids: NDArray[np.int32]


class NativeSampler:
    """Owns threads and their memory. One call at a time. Raises NotBuilt and MemoryError."""

    def __init__(self, vocab_size: int, threads: int) -> None:
        self._library = native_library()
        self._vocab_size = vocab_size
        self._sampler = ctypes.c_void_p(self._library.trivet_sampler_create(vocab_size, threads))
        if not self._sampler:
            raise MemoryError("the sampler's buffers do not fit into memory")

    def __del__(self) -> None:
        sampler = getattr(self, "_sampler", None)
        if sampler:
            self._library.trivet_sampler_destroy(sampler)

    def run(
        self,
        logits: torch.Tensor,
        columns: SamplingColumnArrays,
        rows: SamplingRows,
        tokens: NDArray[np.int64],
        flags: NDArray[np.uint8],
        shifts: NDArray[np.float32],
        *,
        phases: int,
        keeps_filtered: bool,
    ) -> None:
        """Some phases of the order on float32 logits `[R, V]`, in place; `tokens`, `flags` and `shifts` `[R]` are written."""
        batch = _Batch(
            rows=len(rows.slots),
            vocab=self._vocab_size,
            logits=logits.data_ptr(),
            slots=rows.slots.ctypes.data,
            lengths=rows.lengths.ctypes.data,
            prompt_lengths=rows.prompt_lengths.ctypes.data,
            token_ids=rows.token_ids.ctypes.data,
            token_stride=rows.token_ids.shape[1],
            seeds=columns.seeds.ctypes.data,
            temperature=columns.temperature.ctypes.data,
            top_p=columns.top_p.ctypes.data,
            top_k=columns.top_k.ctypes.data,
            min_p=columns.min_p.ctypes.data,
            presence=columns.presence.ctypes.data,
            frequency=columns.frequency.ctypes.data,
            repetition=columns.repetition.ctypes.data,
            min_tokens=columns.min_tokens.ctypes.data,
            constraints=columns.constraints.ctypes.data,
            tokens=tokens.ctypes.data,
            flags=flags.ctypes.data,
            shifts=shifts.ctypes.data,
            phases=phases,
            keeps_filtered=keeps_filtered,
        )
        self._library.trivet_sampler_run(self._sampler, ctypes.byref(batch))

    def pick(
        self,
        scores: torch.Tensor,
        chosen: NDArray[np.int64],
        widths: NDArray[np.int32],
        wanted: NDArray[np.int32],
        is_wanted: NDArray[np.uint8],
        is_plain: NDArray[np.uint8],
        shift: NDArray[np.float32],
    ) -> tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.int32]]:
        """Ids and values, ragged, `widths + 1` a row, and the chosen ids' ranks `[R]`, of float32 scores `[R, V]`."""
        entries = int(widths.sum(dtype=np.int64)) + len(widths)
        ids, values, ranks = np.empty(entries, dtype=np.int32), np.empty(entries, dtype=np.float32), np.empty(len(widths), dtype=np.int32)
        request = _Request(
            rows=len(widths),
            vocab=self._vocab_size,
            scores=scores.data_ptr(),
            chosen=chosen.ctypes.data,
            widths=widths.ctypes.data,
            wanted=wanted.ctypes.data,
            is_wanted=is_wanted.ctypes.data,
            is_plain=is_plain.ctypes.data,
            shift=shift.ctypes.data,
            token_ids=ids.ctypes.data,
            values=values.ctypes.data,
            ranks=ranks.ctypes.data,
        )
        self._library.trivet_sampler_pick(self._sampler, ctypes.byref(request))
        return ids, values, ranks
