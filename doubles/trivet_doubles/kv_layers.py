"""The KV cache that a mock worker announces: layers of any kind, made of a few words or of JSON. Nothing of it is allocated.

Words are kinds, one layer each, separated by commas, with the kind's size after a colon: `full_attention,sliding_window:512`. JSON is a
list of `trivet.v1.LayerKvSpec` in protobuf's JSON form. All kinds made of words have pages of one size.
"""

from collections.abc import Callable
from typing import Any

import msgspec
from google.protobuf import json_format
from trivet_proto.errors import TrivetError, invalid
from trivet_proto.packing import pack_i32
from trivet_proto.v1 import types_pb2

HEAD_SIZE = 8
DTYPE = "float32"
STATE_VALUES = 2 * HEAD_SIZE  # float32 values per token: a key and a value, or one latent
DEFAULT_SIZES = {"sliding_window": 512, "chunked_local_attention": 512, "cross_attention": 1500}

Layers = list[types_pb2.LayerKvSpec]
Spec = types_pb2.KvCacheSpec


def kv_layers(text: str, block_size: int) -> Layers:
    """Raises INVALID_ARGUMENT for what cannot be read or is of no known kind."""
    if text.lstrip().startswith(("[", "{")):
        return _from_json(text)
    return [_layer(index, word.strip(), block_size) for index, word in enumerate(text.split(","))]


def _layer(index: int, word: str, block_size: int) -> types_pb2.LayerKvSpec:
    kind, _, size = word.partition(":")
    fill = KINDS.get(kind)
    if fill is None or (size and (kind not in DEFAULT_SIZES or not size.isdecimal() or int(size) < 1)):
        raise invalid(
            f"kv_spec: {word!r} is no layer; known are {', '.join(KINDS)}, with a size in tokens for {', '.join(DEFAULT_SIZES)}, "
            "as in sliding_window:512; or give a JSON list of LayerKvSpec",
            "kv_spec",
        )
    spec = Spec(block_size=block_size, page_size_bytes=block_size * STATE_VALUES * 4, num_heads=1, dtype=DTYPE)
    spec.head_size = spec.head_size_v = HEAD_SIZE
    fill(spec, int(size) if size else DEFAULT_SIZES.get(kind, 0))
    return types_pb2.LayerKvSpec(layer=f"layer.{index}", spec=spec)


def _full_attention(spec: Spec, size: int) -> None:
    spec.full_attention.SetInParent()


def _sliding_window(spec: Spec, size: int) -> None:
    spec.sliding_window.window = size


def _chunked(spec: Spec, size: int) -> None:
    spec.chunked_local_attention.chunk_size = size


def _cross(spec: Spec, size: int) -> None:
    spec.cross_attention.max_encoder_tokens = size


def _latent(spec: Spec, size: int) -> None:
    spec.head_size, spec.head_size_v = STATE_VALUES, 0
    spec.mla_attention.alignment_bytes = 1


def _mamba(spec: Spec, size: int) -> None:
    spec.mamba.dtypes.append(DTYPE)
    spec.mamba.shape_values, spec.mamba.shape_counts = pack_i32([spec.block_size * STATE_VALUES]), pack_i32([1])
    spec.mamba.cache_mode = "none"


KINDS: dict[str, Callable[[Spec, int], None]] = {
    "full_attention": _full_attention,
    "sliding_window": _sliding_window,
    "chunked_local_attention": _chunked,
    "cross_attention": _cross,
    "mla_attention": _latent,
    "mamba": _mamba,
}


def _from_json(text: str) -> Layers:
    try:
        document: Any = msgspec.json.decode(text)
        items = document if isinstance(document, list) else [document]
        layers = [json_format.ParseDict(item, types_pb2.LayerKvSpec()) for item in items]
    except (msgspec.DecodeError, json_format.ParseError, UnicodeError) as error:
        raise _unreadable(str(error)) from error
    if not layers or any(layer.spec.WhichOneof("kind") is None or not layer.spec.page_size_bytes for layer in layers):
        raise _unreadable("each layer needs a spec with a kind and pageSizeBytes")
    return layers


def _unreadable(why: str) -> TrivetError:
    return invalid(f"kv_spec: it is no JSON list of trivet.v1.LayerKvSpec: {why}", "kv_spec")
