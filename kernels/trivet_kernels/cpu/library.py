"""The native operators as Python sees them: the library, its structures, and why there is none where there is none.

Loaded once, when first asked for. Nothing here computes.
"""

import ctypes
from functools import cache

from trivet_kernels.cpu.attention_signatures import ATTENTION_SIGNATURES
from trivet_kernels.cpu.build import LIBRARY
from trivet_kernels.cpu.limit_signatures import LIMIT_SIGNATURES
from trivet_kernels.cpu.operator_signatures import OPERATOR_SIGNATURES


class Shape(ctypes.Structure):
    """`TrivetShape` of native/api.cpp."""

    _fields_ = (
        ("layers", ctypes.c_int64),
        ("hidden", ctypes.c_int64),
        ("heads", ctypes.c_int64),
        ("kv_heads", ctypes.c_int64),
        ("head_size", ctypes.c_int64),
        ("inner", ctypes.c_int64),
        ("vocab", ctypes.c_int64),
        ("most_tokens", ctypes.c_int64),
        ("cache", ctypes.c_int32),
        ("format", ctypes.c_int32),
        ("head_format", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("epsilon", ctypes.c_float),
    )


class Step(ctypes.Structure):
    """`DecoderStep` of native/decoder.h; addresses are of arrays that the caller keeps alive."""

    _fields_ = (
        ("tokens", ctypes.c_int64),
        ("token_ids", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("sequences", ctypes.c_int64),
        ("query_starts", ctypes.c_void_p),
        ("block_table", ctypes.c_void_p),
        ("table_stride", ctypes.c_int64),
        ("block_size", ctypes.c_int64),
        ("shares_prefixes", ctypes.c_int64),
        ("cosines", ctypes.c_void_p),
        ("sines", ctypes.c_void_p),
        ("caches", ctypes.c_void_p),
        ("sampled", ctypes.c_int64),
        ("sampled_rows", ctypes.c_void_p),
        ("logits", ctypes.c_void_p),
        ("normed", ctypes.c_void_p),
    )


_SIGNATURES: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "trivet_decoder_create": (ctypes.c_void_p, (ctypes.c_void_p,)),
    "trivet_decoder_destroy": (None, (ctypes.c_void_p,)),
    "trivet_decoder_fill": (
        None,
        (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_int64),
    ),
    "trivet_decoder_add_rows": (
        ctypes.c_int32,
        (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_int32, ctypes.c_int64),
    ),
    "trivet_decoder_fill_blocks": (
        None,
        (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_int32, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64),
    ),
    "trivet_decoder_norm": (ctypes.c_void_p, (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32)),
    "trivet_decoder_bias": (ctypes.c_void_p, (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32)),
    "trivet_decoder_embedding": (ctypes.c_void_p, (ctypes.c_void_p,)),
    "trivet_decoder_run": (None, (ctypes.c_void_p, ctypes.c_void_p)),
    "trivet_decoder_window": (None, (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)),
    "trivet_decoder_chunks_saved": (ctypes.c_int64, (ctypes.c_void_p,)),
    "trivet_decoder_logits": (None, (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p)),
    "trivet_sampler_create": (ctypes.c_void_p, (ctypes.c_int64, ctypes.c_int32)),
    "trivet_sampler_destroy": (None, (ctypes.c_void_p,)),
    "trivet_sampler_run": (None, (ctypes.c_void_p, ctypes.c_void_p)),
    "trivet_sampler_pick": (None, (ctypes.c_void_p, ctypes.c_void_p)),
    "trivet_use_isa": (ctypes.c_int32, (ctypes.c_char_p,)),
    "trivet_isa": (ctypes.c_char_p, ()),
    **ATTENTION_SIGNATURES,
    **LIMIT_SIGNATURES,
    **OPERATOR_SIGNATURES,
}


class NotBuilt(Exception):
    """There is no library, or it cannot be loaded; the words say which."""


@cache
def native_library() -> ctypes.CDLL:
    """Raises NotBuilt. Calls release the interpreter lock."""
    if not LIBRARY.exists():
        raise NotBuilt("the native operators are not built: install a C++ compiler, then run `python -m trivet_kernels.cpu.build`")
    try:
        library = ctypes.CDLL(str(LIBRARY))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise NotBuilt(f"{LIBRARY} cannot be loaded ({error}); run `python -m trivet_kernels.cpu.build`") from error
    return library


def instruction_set() -> str:
    """The one in use, such as `amx`; raises NotBuilt."""
    name: bytes = native_library().trivet_isa()
    return name.decode()


def use_instruction_set(name: str) -> bool:
    """For tests: decoders made from here on use a lower one than they could. False when the processor does not have it."""
    return bool(native_library().trivet_use_isa(name.encode()))
