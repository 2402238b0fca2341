"""What a double says of the model that it stands for: card, bundle, the ids it may give. No weights are read.

The card's fingerprint is the double's own, so that a double never serves beside a real worker.
"""

import hashlib
from dataclasses import dataclass
from typing import Any

from trivet_checkpoint import Checkpoint, ModelBundle, bundle_of, open_checkpoint, resolve_model
from trivet_proto.errors import invalid
from trivet_proto.packing import pack_i32
from trivet_proto.v1 import types_pb2

from trivet_doubles import synthetic, tokens
from trivet_doubles.tokens import Choices, TokenLaw
from trivet_doubles.vocabulary import with_ends, word_ids

MAX_LOGPROBS = 20


@dataclass(frozen=True)
class DoubleModel:
    """A model by its description alone. `config` is Hugging Face's, as far as the files have it."""

    name: str
    bundle: ModelBundle
    config: dict[str, Any]
    end_ids: tuple[int, ...]
    start_id: int | None
    pad_id: int | None
    words: Choices

    @property
    def vocab_size(self) -> int:
        return int(self.config["vocab_size"])

    @property
    def context(self) -> int:
        """Tokens."""
        return int(self.config["max_position_embeddings"])

    def law(self, *, end_every: int = 0) -> TokenLaw:
        """Words alone, or about every `end_every`-th token an end."""
        return TokenLaw(with_ends(self.words, self.end_ids, end_every))

    def card(self, *, name: str, max_model_len: int, block_size: int) -> types_pb2.ModelCard:
        """What frontends learn; an empty name means the model's own."""
        law = f"trivet double, law {tokens.REVISION}\n".encode()
        card = types_pb2.ModelCard(
            name=name or self.name,
            vocab_size=self.vocab_size,
            max_model_len=max_model_len,
            eos_token_ids=pack_i32(self.end_ids),
            fingerprint=types_pb2.Fingerprint(
                weights=hashlib.sha256(law + self.bundle.digest).digest(),
                dtype="float32",
                kv_dtype="float32",
                sampler_revision=tokens.REVISION,
                batch_invariant=True,
            ),
            tasks=[types_pb2.TASK_GENERATE],
            max_logprobs=MAX_LOGPROBS,
            bundle_sha256=self.bundle.digest,
            block_size=block_size,
        )
        if self.start_id is not None:
            card.bos_token_id = self.start_id
        if self.pad_id is not None:
            card.pad_token_id = self.pad_id
        return card


def load_double_model(model: str, *, is_synthetic: bool) -> DoubleModel:
    """A model's files, none: the embedded default; or the synthetic model, which has none. Raises INVALID_ARGUMENT with the way out."""
    refuse_both(model, is_synthetic=is_synthetic)
    return synthetic_model() if is_synthetic else _of_files(open_checkpoint(resolve_model(model)))


def refuse_both(model: str, *, is_synthetic: bool) -> None:
    """Raises INVALID_ARGUMENT when a model is named and the synthetic one is asked for."""
    if model and is_synthetic:
        raise invalid(f"synthetic: the model {model} is named too; give one of the two", "synthetic")


def synthetic_model() -> DoubleModel:
    """The model that is made in code."""
    bundle = synthetic.synthetic_bundle()
    return DoubleModel(
        name=synthetic.NAME,
        bundle=bundle,
        config=bundle.json("config.json"),
        end_ids=(synthetic.END_ID,),
        start_id=synthetic.START_ID,
        pad_id=synthetic.PAD_ID,
        words=word_ids(bundle.files["tokenizer.json"]),
    )


def _of_files(checkpoint: Checkpoint) -> DoubleModel:
    bundle, special = bundle_of(checkpoint), checkpoint.special_tokens
    return DoubleModel(
        name=checkpoint.name,
        bundle=bundle,
        config=checkpoint.config,
        end_ids=special.eos_ids,
        start_id=special.bos_id,
        pad_id=special.pad_id,
        words=word_ids(bundle.files["tokenizer.json"]),
    )
