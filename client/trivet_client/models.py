"""What a server says of its models and of tokens."""

from dataclasses import dataclass

from trivet_proto.packing import unpack_f32, unpack_i32
from trivet_proto.v1 import inference_pb2, types_pb2

from trivet_client.events import Usage, usage_of

_TASKS = {
    types_pb2.TASK_GENERATE: "generate",
    types_pb2.TASK_EMBED: "embed",
    types_pb2.TASK_CLASSIFY: "classify",
    types_pb2.TASK_SCORE: "score",
    types_pb2.TASK_REWARD: "reward",
}


@dataclass(frozen=True, slots=True)
class Model:
    """A model by one of its names.

    `max_model_len` is its context in tokens; `created` is when the server first knew it, Unix time in seconds; `parent` is the base model
    of an adapter.
    """

    name: str
    max_model_len: int
    vocab_size: int
    tasks: tuple[str, ...]
    parent: str
    created: int


@dataclass(frozen=True, slots=True)
class Tokens:
    """A text or conversation in tokens; `texts` is each token's own text, where it was asked for; `max_model_len` as in `Model`."""

    ids: tuple[int, ...]
    texts: tuple[str, ...]
    max_model_len: int


@dataclass(frozen=True, slots=True)
class Embeddings:
    """One vector for each input, in order."""

    vectors: tuple[tuple[float, ...], ...]
    usage: Usage


def model_of(wire: inference_pb2.PublicModel) -> Model:
    return Model(
        name=wire.name,
        max_model_len=wire.max_model_len,
        vocab_size=wire.vocab_size,
        tasks=tuple(_TASKS[task] for task in wire.tasks if task in _TASKS),
        parent=wire.parent,
        created=wire.created,
    )


def tokens_of(wire: inference_pb2.TokenizeResponse) -> Tokens:
    return Tokens(tuple(unpack_i32(wire.token_ids, "token_ids").tolist()), tuple(wire.tokens), wire.max_model_len)


def embeddings_of(wire: inference_pb2.EmbedResponse) -> Embeddings:
    return Embeddings(tuple(tuple(unpack_f32(each.values).tolist()) for each in wire.embeddings), usage_of(wire.usage))
