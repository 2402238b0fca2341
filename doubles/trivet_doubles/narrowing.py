"""Which of a request's sampling parameters the doubles heed: those that leave only some ids. The seed is all else that counts."""

from trivet_proto.packing import unpack_f32, unpack_i32
from trivet_proto.v1 import types_pb2

from trivet_doubles.tokens import Choices

FORCING_BIAS = 100.0


def narrowed_choices(sampling: types_pb2.SamplingParams) -> Choices | None:
    """The ids that a request allows or, by a logit bias of 100 and more, forces; None where it does neither."""
    if sampling.logit_bias_ids:
        forced = unpack_f32(sampling.logit_bias_values, "logit_bias_values") >= FORCING_BIAS
        if forced.any():
            return unpack_i32(sampling.logit_bias_ids, "logit_bias_ids")[forced]
    if sampling.allowed_token_ids:
        return unpack_i32(sampling.allowed_token_ids, "allowed_token_ids")
    return None
