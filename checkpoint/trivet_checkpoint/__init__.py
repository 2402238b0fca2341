"""MODEL → files: config, tokenizer, chat template, tensor index and fingerprint out of a GGUF file or a Hugging Face folder. No torch."""

from trivet_checkpoint.bundle import ModelBundle, bundle_of
from trivet_checkpoint.checkpoint import Checkpoint, SpecialTokens, TensorRecord
from trivet_checkpoint.model_config import check_sizes, served_architecture
from trivet_checkpoint.opening import open_checkpoint, resolve_model
from trivet_checkpoint.quantization import dequantize

__all__ = [
    "Checkpoint",
    "ModelBundle",
    "SpecialTokens",
    "TensorRecord",
    "bundle_of",
    "check_sizes",
    "dequantize",
    "open_checkpoint",
    "resolve_model",
    "served_architecture",
]
