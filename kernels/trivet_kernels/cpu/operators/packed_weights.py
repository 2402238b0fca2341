"""Linear layers over packed weights: float32, bfloat16, eight bits, or the blocks of a GGUF file.

A packed weight is a flat uint8 tensor in the order in which native/matmul.h reads it; format and sizes go beside it, so the operators see
nothing but tensors and numbers. Products have the same bits whatever rows stand beside one.
"""

import ctypes
import math
from dataclasses import dataclass

import torch

from trivet_kernels.cpu.decoder import WeightFormat
from trivet_kernels.cpu.operator_signatures import Packed
from trivet_kernels.cpu.operators.memory import TYPES, as_rows, floats, type_of
from trivet_kernels.cpu.operators.registration import register
from trivet_kernels.cpu.operators.threads import operator_library
from trivet_kernels.pages import zeroed_bytes

ALIGNMENT = 64  # bytes


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight `[outputs, inputs]`, packed; zeros until filled."""

    data: torch.Tensor  # uint8 [bytes]
    format: WeightFormat
    outputs: int
    inputs: int

    @classmethod
    def empty(cls, format: WeightFormat, outputs: int, inputs: int) -> "PackedWeight":
        """In huge pages where the system has them, since all of it is read at every step. Raises ValueError for sizes that do not fit."""
        return cls(zeroed_bytes(_bytes_of(Packed(None, outputs, inputs, format))), format, outputs, inputs)

    def fill(self, values: torch.Tensor, first_row: int = 0) -> None:
        """Put rows `[first_row, first_row + len)`, `[rows, inputs]` of any floating dtype, into their place."""
        values = (values if values.dtype in TYPES else values.float()).contiguous()
        native = self._taking(len(values), first_row)
        operator_library().trivet_pack(ctypes.byref(native), TYPES[values.dtype], values.data_ptr(), first_row, len(values))

    def fill_blocks(self, rows: torch.Tensor, kind: WeightFormat, first_row: int = 0) -> None:
        """The same out of GGUF blocks, uint8 `[rows, bytes of a row]`: taken over without a change of value where their kind is the
        weight's own format, otherwise (of the formats that a file does not know) as the floats that they stand for."""
        rows, native = rows.contiguous(), self._taking(len(rows), first_row)
        operator_library().trivet_pack_blocks(ctypes.byref(native), kind, rows.data_ptr(), first_row, len(rows))

    def _taking(self, count: int, first_row: int) -> Packed:
        if not 0 <= first_row <= first_row + count <= self.outputs:
            raise IndexError(f"rows {first_row} to {first_row + count} of {self.outputs}")
        return _native(self.data, self.outputs, self.inputs, self.format)


def linear(hidden: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`hidden · weightᵀ + bias`, `[…, inputs]` → `[…, outputs]`, in the dtype of `hidden`."""
    if hidden.shape[-1] != weight.inputs:
        raise ValueError(f"rows of {hidden.shape[-1]} for a weight [{weight.outputs}, {weight.inputs}]")
    output: torch.Tensor = _LINEAR(hidden, weight.data, bias, weight.outputs, weight.format)
    return output


def packed_rows(rows: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    """Rows of the weight by number, int64 `[R]`, as they are multiplied: float32 `[R, inputs]`. Raises IndexError."""
    values: torch.Tensor = _PACKED_ROWS(rows, weight.data, weight.outputs, weight.inputs, weight.format)
    return values


def _bytes_of(native: Packed) -> int:
    count: int = operator_library().trivet_packed_bytes(ctypes.byref(native))
    if count < 0:
        raise ValueError(f"no packed weight [{native.n}, {native.k}] in {WeightFormat(native.format).name}")
    return count


def _native(data: torch.Tensor, outputs: int, inputs: int, format: int) -> Packed:
    """Raises ValueError for a tensor that cannot be such a weight."""
    native = Packed(data.data_ptr(), outputs, inputs, format)
    wanted = _bytes_of(native)
    if data.dtype is not torch.uint8 or data.shape != (wanted,) or not data.is_contiguous() or data.data_ptr() % ALIGNMENT:
        raise ValueError(f"a packed weight [{outputs}, {inputs}] is {wanted} aligned bytes, not {list(data.shape)} of {data.dtype}")
    return native


def _linear(hidden: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, outputs: int, format: int) -> torch.Tensor:
    native, output = _native(packed, outputs, hidden.shape[-1], format), _fake_linear(hidden, packed, bias, outputs, format)
    number, rows = type_of(hidden), as_rows(hidden)
    added = None if bias is None else floats(bias)
    if added is not None and added.shape != (outputs,):
        raise ValueError(f"a bias {list(added.shape)} for {outputs} outputs")
    sums = None if hidden.dtype is torch.float32 else torch.empty(math.prod(output.shape), dtype=torch.float32)
    operator_library().trivet_linear(
        ctypes.byref(native),
        number,
        rows.data_ptr(),
        rows.stride(0),
        rows.shape[0],
        None if added is None else added.data_ptr(),
        output.data_ptr(),
        None if sums is None else sums.data_ptr(),
    )
    return output


def _packed_rows(rows: torch.Tensor, packed: torch.Tensor, outputs: int, inputs: int, format: int) -> torch.Tensor:
    native, output = _native(packed, outputs, inputs, format), torch.empty((len(rows), inputs), dtype=torch.float32)
    numbers = rows.to(torch.int64).contiguous()
    outside = operator_library().trivet_packed_rows(ctypes.byref(native), numbers.data_ptr(), len(numbers), output.data_ptr())
    if outside >= 0:
        raise IndexError(f"row {int(numbers[outside])} of {outputs}")
    return output


def _fake_linear(hidden: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, outputs: int, format: int) -> torch.Tensor:
    return hidden.new_empty((*hidden.shape[:-1], outputs))


def _fake_packed_rows(rows: torch.Tensor, packed: torch.Tensor, outputs: int, inputs: int, format: int) -> torch.Tensor:
    return packed.new_empty((rows.shape[0], inputs), dtype=torch.float32)


_LINEAR = register("linear(Tensor hidden, Tensor packed, Tensor? bias, int outputs, int format) -> Tensor", _linear, _fake_linear)
_PACKED_ROWS = register(
    "packed_rows(Tensor rows, Tensor packed, int outputs, int inputs, int format) -> Tensor", _packed_rows, _fake_packed_rows
)
