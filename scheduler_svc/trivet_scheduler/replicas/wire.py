"""Between the core's arrays and the worker contract's messages."""

from collections.abc import Iterator

from trivet_proto.errors import ErrorKind, TrivetError
from trivet_proto.limits import MAX_STREAM_MESSAGE_BYTES
from trivet_proto.packing import pack_i32, pack_u32, unpack_f32, unpack_i32, unpack_u32
from trivet_proto.v1 import types_pb2, worker_pb2

from trivet_scheduler.kv import specs
from trivet_scheduler.kv.memory import KVCacheConfig
from trivet_scheduler.plan import LogprobArrays, NewWork, StepOutcome, StepPlan, StepStatus

PART_BYTES = MAX_STREAM_MESSAGE_BYTES // 2

STATUSES = {
    worker_pb2.STEP_STATUS_DONE: StepStatus.DONE,
    worker_pb2.STEP_STATUS_FAILED: StepStatus.FAILED,
    worker_pb2.STEP_STATUS_SKIPPED: StepStatus.SKIPPED,
}


# ---- down ----


def step_messages(plan: StepPlan, epoch: types_pb2.Epoch, eos_token_ids: bytes) -> Iterator[worker_pb2.Step]:
    """The step, in several parts when its new requests are many and long."""
    new = [_new_request(work, eos_token_ids) for work in plan.new]
    groups = _in_parts(new)
    for index, group in enumerate(groups):
        last = index == len(groups) - 1
        step = worker_pb2.Step(epoch=epoch, step=plan.number, new_requests=group)
        if len(groups) > 1:
            step.part.index, step.part.count = index, len(groups)
        if last:
            step.finished_handles = pack_u32(plan.finished_handles)
            step.blocks_to_zero = pack_i32(plan.blocks_to_zero)
            step.known.handles = pack_u32(plan.known_handles)
            step.known.num_scheduled_tokens = pack_i32(plan.known_scheduled)
            step.known.num_computed_tokens = pack_i32(plan.known_computed)
            step.known.new_block_ids = pack_i32(plan.new_blocks)
            step.known.new_block_counts = pack_i32(plan.new_block_counts)
            if plan.resync is not None:
                step.resync = plan.resync
            step.run_ahead = plan.run_ahead
            step.forecast_us = int((plan.forecast_s or 0.0) * 1e6)
        yield step


def _in_parts(new: list[worker_pb2.NewRequest]) -> list[list[worker_pb2.NewRequest]]:
    groups: list[list[worker_pb2.NewRequest]] = [[]]
    size = 0
    for request in new:
        bytes_of = request.ByteSize()
        if groups[-1] and size + bytes_of > PART_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(request)
        size += bytes_of
    return groups


def _new_request(work: NewWork, eos_token_ids: bytes) -> worker_pb2.NewRequest:
    request = work.request
    sampling = request.spec.sampling
    if request.child > 0 and sampling.HasField("prompt_logprobs"):
        # The prompt is reported once, by the first child.
        copy = types_pb2.SamplingParams()
        copy.CopyFrom(sampling)
        copy.ClearField("prompt_logprobs")
        sampling = copy
    return worker_pb2.NewRequest(
        handle=work.handle,
        token_ids=pack_i32(work.token_ids),
        num_prompt_tokens=request.num_prompt,
        sampling=sampling,
        seed=request.seed,
        block_ids=pack_i32(work.block_ids),
        block_counts=pack_i32([len(work.block_ids)]),
        num_computed_tokens=work.num_computed,
        num_scheduled_tokens=work.num_scheduled,
        task=types_pb2.TASK_GENERATE,
        prompt_logprobs_reported=request.prompt_logprobs_done,
        eos_token_ids=eos_token_ids,
    )


def config_message(config: KVCacheConfig) -> types_pb2.KvCacheConfig:
    return types_pb2.KvCacheConfig(
        num_blocks=config.num_blocks,
        tensors=[
            types_pb2.KvCacheTensor(size_bytes=tensor.size_bytes, layers=tensor.layers, layout=tensor.layout) for tensor in config.tensors
        ],
        groups=[types_pb2.KvCacheGroup(layers=group.layers, spec=spec_message(group.spec)) for group in config.groups],
    )


# ---- up ----


def outcome_of(result: worker_pb2.StepResult) -> StepOutcome:
    """Raises INVALID_ARGUMENT or ABORTED when the message does not hold together."""
    status = STATUSES.get(result.status)
    if status is None:
        raise TrivetError(ErrorKind.INVALID_ARGUMENT, f"the result of step {result.step} has no known status")
    handles: list[int] = unpack_u32(result.handles, "handles").tolist()
    counts: list[int] = unpack_i32(result.token_counts, "token_counts").tolist()
    token_ids: list[int] = unpack_i32(result.token_ids, "token_ids").tolist()
    flags = result.flags
    if status is StepStatus.DONE and (len(counts) != len(handles) or sum(counts) != len(token_ids) or len(flags) not in (0, len(handles))):
        raise TrivetError(ErrorKind.INVALID_ARGUMENT, f"the arrays of the result of step {result.step} do not fit together")
    return StepOutcome(
        number=result.step,
        status=status,
        handles=handles,
        token_counts=counts,
        token_ids=token_ids,
        logprob_rows=unpack_i32(result.logprob_rows, "logprob_rows").tolist(),
        logprobs=logprob_arrays(result.logprobs) if result.HasField("logprobs") else None,
        prompt_logprobs=[(chunk.handle, chunk.first_position, chunk.logprobs) for chunk in result.prompt_logprobs],
        flags=flags,
        error=TrivetError.from_proto(result.error) if result.HasField("error") else None,
        iteration=result.iteration,
        is_last=result.last_iteration,
    )


def logprob_arrays(message: types_pb2.Logprobs) -> LogprobArrays:
    return LogprobArrays(
        unpack_i32(message.counts, "logprobs.counts"),
        unpack_i32(message.token_ids, "logprobs.token_ids"),
        unpack_f32(message.values, "logprobs.values"),
        unpack_i32(message.ranks, "logprobs.ranks"),
    )


# ---- specs ----


def spec_of(message: types_pb2.KvCacheSpec) -> specs.KVCacheSpec:
    """Raises FAILED_PRECONDITION for a kind that this build does not know."""
    kind = message.WhichOneof("kind")
    if kind == "mamba":
        counts = unpack_i32(message.mamba.shape_counts).tolist()
        values = unpack_i32(message.mamba.shape_values).tolist()
        shapes = tuple(tuple(values[sum(counts[:index]) : sum(counts[: index + 1])]) for index in range(len(counts)))
        return specs.MambaSpec(
            block_size=message.block_size,
            shapes=shapes,
            dtypes=tuple(message.mamba.dtypes),
            cache_mode=message.mamba.cache_mode or "none",
            speculative_blocks=message.mamba.speculative_blocks,
        )
    block_size, heads, size, dtype = message.block_size, message.num_heads, message.head_size, message.dtype
    size_v, quantization = message.head_size_v, message.quantization
    if kind == "full_attention":
        full = message.full_attention
        return specs.FullAttentionSpec(
            block_size=block_size,
            kv_heads=heads,
            head_size=size,
            head_size_v=size_v,
            dtype=dtype,
            quantization=quantization,
            sliding_window=full.sliding_window if full.HasField("sliding_window") else None,
            chunk_size=full.chunk_size if full.HasField("chunk_size") else None,
        )
    if kind == "sliding_window":
        return specs.SlidingWindowSpec(
            block_size=block_size, kv_heads=heads, head_size=size, head_size_v=size_v, dtype=dtype, window=message.sliding_window.window
        )
    if kind == "chunked_local_attention":
        chunk = message.chunked_local_attention.chunk_size
        return specs.ChunkedLocalAttentionSpec(
            block_size=block_size, kv_heads=heads, head_size=size, head_size_v=size_v, dtype=dtype, chunk_size=chunk
        )
    if kind == "cross_attention":
        most = message.cross_attention.max_encoder_tokens
        return specs.CrossAttentionSpec(
            block_size=block_size, kv_heads=heads, head_size=size, head_size_v=size_v, dtype=dtype, max_encoder_tokens=most
        )
    if kind == "mla_attention":
        alignment = message.mla_attention.alignment_bytes or 1
        return specs.MLAAttentionSpec(
            block_size=block_size, kv_heads=heads, head_size=size, head_size_v=0, dtype=dtype, alignment_bytes=alignment
        )
    raise TrivetError(ErrorKind.FAILED_PRECONDITION, f"KV cache specs of kind {kind} are not known to this scheduler")


def spec_message(spec: specs.KVCacheSpec) -> types_pb2.KvCacheSpec:
    message = types_pb2.KvCacheSpec(block_size=spec.block_size, page_size_bytes=spec.page_size_bytes, num_heads=spec.num_heads)
    if isinstance(spec, specs.AttentionSpec):
        message.head_size, message.head_size_v = spec.head_size, spec.value_size
        message.dtype, message.quantization = spec.dtype, spec.quantization
    if isinstance(spec, specs.FullAttentionSpec):
        message.full_attention.SetInParent()
        if spec.sliding_window is not None:
            message.full_attention.sliding_window = spec.sliding_window
        if spec.chunk_size is not None:
            message.full_attention.chunk_size = spec.chunk_size
    return message
