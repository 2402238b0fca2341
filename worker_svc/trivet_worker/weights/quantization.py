"""How weights are kept in memory, as the settings name it."""

from typing import Literal

Quantization = Literal["none", "gguf", "int8", "int8-dynamic"]
"""none: in the dtype of the computation; gguf: in the blocks of the file; int8: in blocks of 32 bytes with a scale and a minimum;
int8-dynamic: eight bits with a scale per output, activations eight bits with a scale per token."""
