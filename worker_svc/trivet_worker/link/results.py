"""A step's result as messages: what would not fit into one is cut."""

from trivet_proto.v1 import worker_pb2

MOST_BYTES = 512 * 1024  # half of what a message of a stream may have: everything else has room beside it


def split_result(result: worker_pb2.StepResult, most_bytes: int = MOST_BYTES) -> list[worker_pb2.StepResult]:
    """Prompt logprobs can be megabytes: they go ahead in parts, everything else is in the last."""
    chunks = list(result.prompt_logprobs)
    if sum(chunk.ByteSize() for chunk in chunks) <= most_bytes:
        return [result]
    groups: list[list[worker_pb2.PromptLogprobChunk]] = [[]]
    size = 0
    for chunk in chunks:
        if groups[-1] and size + chunk.ByteSize() > most_bytes:
            groups.append([])
            size = 0
        groups[-1].append(chunk)
        size += chunk.ByteSize()
    parts = [worker_pb2.StepResult(epoch=result.epoch, step=result.step, prompt_logprobs=group) for group in groups[:-1]]
    last = worker_pb2.StepResult()
    last.CopyFrom(result)
    del last.prompt_logprobs[:]
    last.prompt_logprobs.extend(groups[-1])
    parts.append(last)
    for index, part in enumerate(parts):
        part.part.index, part.part.count = index, len(parts)
    return parts
