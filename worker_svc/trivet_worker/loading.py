"""From settings to a model that can run: checkpoint, weights, backend, KV memory, and what the scheduler must be told of them."""

import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from trivet_checkpoint import Checkpoint, ModelBundle, bundle_of, check_sizes, open_checkpoint, resolve_model
from trivet_proto.errors import ErrorKind, TrivetError, invalid
from trivet_proto.limits import MAX_MESSAGE_BYTES, MAX_PROMPT_LOGPROBS
from trivet_proto.packing import pack_i32
from trivet_proto.v1 import types_pb2

from trivet_worker.attention.backends import AttentionBackend, select_backend
from trivet_worker.batch_invariance import holds_batch_invariance
from trivet_worker.config import WorkerSettings
from trivet_worker.models.building import ModelRequest, attention_needs, build_model
from trivet_worker.models.llama import head_size_of
from trivet_worker.models.model import Model
from trivet_worker.models.registry import ARCHITECTURES, forms_of
from trivet_worker.runner.limits import RunnerLimits
from trivet_worker.runner.runner import ModelRunner
from trivet_worker.sampling.noise import REVISION
from trivet_worker.sampling.processors import load_processors
from trivet_worker.weights import loader

logger = logging.getLogger(__name__)

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
LEAST_BYTES = {"int8": 1.0, "int8-dynamic": 1.0, "gguf": 0.5}  # of a weight, by quantization; with none it is the dtype's
LOGPROB_BYTES = 8  # of an id and its value
LOG_EVERY = 0.25  # of the weights, where there is no terminal to show a bar


@dataclass(frozen=True)
class LoadedModel:
    """All that the link needs."""

    runner: ModelRunner
    backend: AttentionBackend
    limits: RunnerLimits
    card: types_pb2.ModelCard
    bundle: ModelBundle
    layers: list[types_pb2.LayerKvSpec]
    kv_bytes: int


@dataclass(frozen=True)
class PreparedModel:
    """What was decided of a model that can run; `fill` makes it and reads its weights."""

    checkpoint: Checkpoint
    dtype: torch.dtype
    context: int
    backend: AttentionBackend
    is_invariant: bool
    fill: Callable[[], Model]


def prepare_model(settings: WorkerSettings) -> PreparedModel:
    """Raises a configuration error, with the way out, before anything heavy is done."""
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    checkpoint = open_checkpoint(resolve_model(settings.model), served=ARCHITECTURES)
    check_sizes(checkpoint)
    dtype, context = TORCH_DTYPES[settings.chosen_dtype], settings.context(checkpoint.max_model_len)
    wanted = ModelRequest(
        form=settings.model_form,
        quantization=settings.quantization,
        dtype=dtype,
        kv_dtype=torch.int8 if settings.kv_dtype == "int8" else dtype,
        block_size=settings.block_size,
        max_model_len=context,
        most_tokens=settings.max_num_batched_tokens,
        threads=torch.get_num_threads(),
    )
    needs = attention_needs(checkpoint, wanted)
    held = _check_weights(checkpoint, wanted, settings)
    selection = select_backend(needs, settings.attention_backend)
    for name, reason in selection.rejected:
        logger.info("attention backend %s is not taken: %s", name, reason)
    reasons = "; ".join(f"{name}: {reason}" for name, reason in selection.rejected) or f"attention_backend {selection.backend.name}"
    is_invariant = holds_batch_invariance(settings.batch_invariant, is_native=selection.backend.batch_invariant, reasons=reasons)

    def filled() -> Model:
        model = build_model(checkpoint, wanted, needs, selection)
        _check_cache(settings, _block_bytes(model, settings), held)
        _fill(model, checkpoint, settings)
        return model

    selection.backend.operators.use_threads(wanted.threads)
    return PreparedModel(checkpoint, dtype, context, selection.backend, is_invariant, filled)


def _check_weights(checkpoint: Checkpoint, wanted: ModelRequest, settings: WorkerSettings) -> int:
    """What weights and angles take at least, in bytes.

    Raises FAILED_PRECONDITION for weights that are not in the files or that this machine cannot hold, before anything is allocated.
    """
    config, forms = checkpoint.config, forms_of(checkpoint)
    if settings.load_format != "dummy":
        loader.check_tensors(checkpoint, forms.tensors(config))
    weights = int(forms.weight_values(config) * (LEAST_BYTES.get(wanted.quantization) or wanted.dtype.itemsize))
    angles = wanted.max_model_len * head_size_of(config) * torch.float32.itemsize
    machine = memory_total()
    if weights > machine:
        reason, way_out = f"its weights take {weights} bytes at least", "take a smaller model or a quantization"
    elif weights + angles > machine:
        reason, way_out = f"the rotary angles of {wanted.max_model_len} positions take {angles} bytes", "lower max_model_len"
    else:
        return weights + angles
    raise TrivetError(ErrorKind.FAILED_PRECONDITION, f"{checkpoint.config_file}: {reason}, this machine has {machine}; {way_out}")


def _check_cache(settings: WorkerSettings, bytes_per_block: int, held: int) -> None:
    """Raises FAILED_PRECONDITION for a KV cache this machine cannot hold beside the `held` bytes of the model, which are not read yet."""
    if (asked := _asked_cache(settings, bytes_per_block)) is not None and asked.bytes + held > (machine := memory_total()):
        raise TrivetError(
            ErrorKind.FAILED_PRECONDITION,
            f"{asked.name}: {asked.value} is a KV cache of {asked.bytes} bytes, the model takes {held} beside it, this machine has "
            f"{machine}; lower it, or leave it out for a share of what is free (memory_utilization)",
            param=asked.name,
        )


@dataclass(frozen=True, slots=True)
class _AskedCache:
    """A size of the KV cache that a setting names."""

    name: str
    value: int
    bytes: int


def _asked_cache(settings: WorkerSettings, bytes_per_block: int) -> _AskedCache | None:
    """The first setting that is given counts."""
    if settings.num_kv_blocks is not None:
        return _AskedCache("num_kv_blocks", settings.num_kv_blocks, settings.num_kv_blocks * bytes_per_block)
    if settings.kv_cache_memory is not None:
        return _AskedCache("kv_cache_memory", settings.kv_cache_memory, settings.kv_cache_memory)
    return None


def _block_bytes(model: Model, settings: WorkerSettings) -> int:
    """Of one block in all layers."""
    return sum(cache.page_bytes(settings.block_size) for cache in model.layer_caches())


def load_model(settings: WorkerSettings) -> LoadedModel:
    """Raises a configuration error, with the way out, before anything heavy is done."""
    prepared = prepare_model(settings)
    checkpoint, dtype, context, backend = prepared.checkpoint, prepared.dtype, prepared.context, prepared.backend
    processors = load_processors(settings.logits_processors, checkpoint.vocab_size)
    model = prepared.fill()
    caches = model.layer_caches()
    limits = RunnerLimits(settings.max_num_seqs, settings.max_num_batched_tokens, context, settings.block_size)
    runner = ModelRunner(model, backend.operators, limits, prepared.fill, processors)
    runner.warm_up()
    bundle = bundle_of(checkpoint)
    logger.info("loaded %s in %s, attention backend %s, %d threads", checkpoint.path.name, dtype, backend.name, torch.get_num_threads())
    return LoadedModel(
        runner=runner,
        backend=backend,
        limits=limits,
        card=_card(settings, checkpoint, bundle, dtype, context, is_invariant=prepared.is_invariant),
        bundle=bundle,
        layers=[cache.to_proto(settings.block_size) for cache in caches],
        kv_bytes=_kv_bytes(settings, _block_bytes(model, settings), model.vocab_size),
    )


def _fill(model: Model, checkpoint: Checkpoint, settings: WorkerSettings) -> None:
    if settings.load_format == "dummy":
        loader.fill_dummy(model.placements())
        return
    factors = loader.rope_factors(checkpoint)
    if factors is not None:
        model.use_rope_factors(factors)
    if sys.stderr.isatty():
        columns = (TextColumn("loading weights"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
        with Progress(*columns, transient=True) as bar:
            task = bar.add_task("weights")
            loader.load_weights(checkpoint, model.placements(), lambda done, total: bar.update(task, completed=done, total=total))
        return
    shown = 0.0

    def log(done: int, total: int) -> None:
        nonlocal shown
        if done / total >= shown + LOG_EVERY:
            shown = done / total
            logger.info("loading weights: %d %%", 100 * shown)

    loader.load_weights(checkpoint, model.placements(), log)


def _card(
    settings: WorkerSettings, checkpoint: Checkpoint, bundle: ModelBundle, dtype: torch.dtype, context: int, *, is_invariant: bool
) -> types_pb2.ModelCard:
    special, dtype_name = checkpoint.special_tokens, str(dtype).removeprefix("torch.")
    card = types_pb2.ModelCard(
        name=settings.served_model_name or checkpoint.name,
        vocab_size=checkpoint.vocab_size,
        max_model_len=context,
        eos_token_ids=pack_i32(special.eos_ids),
        fingerprint=types_pb2.Fingerprint(
            weights=bytes.fromhex(checkpoint.fingerprint),
            dtype=dtype_name,
            quantization="" if settings.quantization == "none" else settings.quantization,
            kv_dtype=dtype_name if settings.kv_dtype == "auto" else settings.kv_dtype,
            sampler_revision=REVISION,
            batch_invariant=is_invariant,
        ),
        tasks=[types_pb2.TASK_GENERATE],
        max_logprobs=_max_logprobs(settings, checkpoint.vocab_size),
        bundle_sha256=bundle.digest,
        block_size=settings.block_size,
    )
    if special.bos_id is not None:
        card.bos_token_id = special.bos_id
    if special.pad_id is not None:
        card.pad_token_id = special.pad_id
    return card


def _max_logprobs(settings: WorkerSettings, vocab_size: int) -> int:
    """Raises INVALID_ARGUMENT where a step's answer could become longer than any message."""
    most = vocab_size if settings.max_logprobs < 0 else min(settings.max_logprobs, vocab_size)
    entries = settings.max_num_seqs * (most + 1) + settings.max_num_batched_tokens * (min(most, MAX_PROMPT_LOGPROBS) + 1)
    if entries * LOGPROB_BYTES > MAX_MESSAGE_BYTES:
        raise invalid(
            f"max_logprobs: {most} log probabilities for each of {settings.max_num_seqs} requests (max_num_seqs) and those of "
            f"{settings.max_num_batched_tokens} prompt tokens (max_num_batched_tokens) do not fit into a step's answer; lower one of them",
            "max_logprobs",
        )
    return most


def _kv_bytes(settings: WorkerSettings, bytes_per_block: int, vocab_size: int) -> int:
    """Memory for the KV cache: as told, or a share of what is free now, less what a step's logits need at most."""
    free = memory_available()
    if (asked := _asked_cache(settings, bytes_per_block)) is not None:
        if asked.bytes > free:  # blocks take memory once they are written, and other processes may leave, so it may still go well
            logger.warning(
                "%s: %s is a KV cache of %d bytes, %d are free now; a process that takes more than there is is ended by the system",
                *(asked.name, asked.value, asked.bytes, free),
            )
        return asked.bytes
    # Logits exist twice while a step samples (raw and filtered), in float32.
    step = 2 * settings.max_num_seqs * vocab_size * 4
    return max(2 * bytes_per_block, int(max(0, free - step) * settings.memory_utilization))


def memory_available() -> int:
    """Bytes that can be taken without swapping: the machine's, or what is left of the container's limit where that is less."""
    limit = _container_limit()
    free = _of_machine("MemAvailable")
    if limit is not None:
        free = min(free, limit - int(Path("/sys/fs/cgroup/memory.current").read_text()))
    return max(0, free)


def memory_total() -> int:
    """Bytes of the machine, or the container's limit where that is less."""
    return min(_of_machine("MemTotal"), _container_limit() or sys.maxsize)


def _of_machine(entry: str) -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{entry}:"))


def _container_limit() -> int | None:
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.exists() else "max"
    return None if text == "max" else int(text)
