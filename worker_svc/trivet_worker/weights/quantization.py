"""How weights are kept in memory, as the settings name it."""

from typing import Literal

Quantization = Literal["none", "gguf", "int8"]
"""none: in the dtype of the computation; gguf: in the blocks of the file; int8: eight bits a weight, activations too."""
