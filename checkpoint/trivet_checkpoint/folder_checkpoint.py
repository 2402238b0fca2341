"""A checkpoint out of a Hugging Face folder: config.json, tokenizer.json, safetensors (sharded or not) and their company."""

import struct
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any

import msgspec
from trivet_proto.errors import invalid

from trivet_checkpoint.checkpoint import Checkpoint, SpecialTokens, TensorRecord
from trivet_checkpoint.entries import FETCH_AGAIN
from trivet_checkpoint.model_config import check_generation, read_description
from trivet_checkpoint.quantization import FORMATS

INDEX = "model.safetensors.index.json"
LONGEST_HEADER = 256 * 1024 * 1024
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class _TensorEntry(msgspec.Struct):
    dtype: str
    shape: list[Annotated[int, msgspec.Meta(ge=0)]]
    data_offsets: tuple[int, int]


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _TokenizerModel(msgspec.Struct):
    vocab: Any = None  # unigram models have a list of scores here


class _TokenizerFile(msgspec.Struct):
    model: _TokenizerModel
    added_tokens: list[_AddedToken] = []


def open_folder(path: Path, served: Collection[str] | None = None) -> Checkpoint:
    """Raises INVALID_ARGUMENT with the file's name when one is missing or broken, FAILED_PRECONDITION for an architecture not `served`."""
    config = read_description(_read_json(path / "config.json"), str(path / "config.json"), served)
    generation_config = _read_json(path / "generation_config.json") if (path / "generation_config.json").exists() else {}
    check_generation(generation_config, str(path / "generation_config.json"), config["vocab_size"])
    tokenizer_config = _read_json(path / "tokenizer_config.json") if (path / "tokenizer_config.json").exists() else {}
    tokenizer = path / "tokenizer.json"
    if not tokenizer.exists():
        raise invalid(f"{path}: tokenizer.json is missing; save the model's fast tokenizer there")
    vocabulary = _vocabulary(tokenizer)
    tensors = _records(path)
    template, place = _chat_template(path, tokenizer_config)
    # A config that does not speak of tying is tied exactly when there is no other head.
    config.setdefault("tie_word_embeddings", "lm_head.weight" not in tensors)
    return Checkpoint(
        path=path,
        format="safetensors",
        name=path.resolve().name,
        config=config,
        generation_config=generation_config,
        tokenizer_config=tokenizer_config,
        special_tokens=_special_tokens(config, generation_config, tokenizer_config, vocabulary),
        chat_template=template,
        chat_template_place=place,
        tensors=tensors,
        build_tokenizer=tokenizer.read_bytes,
    )


def _records(path: Path) -> dict[str, TensorRecord]:
    index = path / INDEX
    weight_map = _weight_map(index) if index.exists() else {}
    files = sorted({path / name for name in weight_map.values()}) or sorted(path.glob("*.safetensors"))
    if not files:
        raise invalid(f"{path}: no safetensors files; weights in other formats are not read")
    records: dict[str, TensorRecord] = {}
    for file in files:
        records.update(_read_header(file))
    for name, shard in weight_map.items():
        if name not in records:
            raise invalid(f"{path / shard}: tensor {name} is missing, {INDEX} places it there; {FETCH_AGAIN}")
    return records


def _weight_map(index: Path) -> dict[str, str]:
    try:
        return msgspec.convert(_read_json(index).get("weight_map"), dict[str, str])
    except msgspec.ValidationError as error:
        raise invalid(f"{index}: weight_map must name a file for each tensor: {error}") from error


def _read_header(file: Path) -> dict[str, TensorRecord]:
    try:
        total = file.stat().st_size
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > min(LONGEST_HEADER, total - 8):
                raise invalid(f"{file} is no safetensors file or is cut off: its header claims {length} bytes of {total}; {FETCH_AGAIN}")
            header = msgspec.json.decode(stream.read(length), type=dict[str, Any])
    except OSError as error:
        raise invalid(f"{file} cannot be read: {error.strerror}") from error
    except (struct.error, *UNREADABLE) as error:
        raise invalid(f"{file} is no safetensors file: its header cannot be read; {FETCH_AGAIN}") from error
    header.pop("__metadata__", None)
    return {name: _place(file, name, entry, 8 + length, total) for name, entry in header.items()}


def _place(file: Path, name: str, raw: object, start: int, total: int) -> TensorRecord:
    try:
        entry = msgspec.convert(raw, _TensorEntry)
    except msgspec.ValidationError as error:
        raise invalid(f"{file}: the description of tensor {name} is broken: {error}; {FETCH_AGAIN}") from error
    begin, end = entry.data_offsets
    kind = entry.dtype  # plain formats have the same names here
    if not 0 <= begin <= end or start + end > total:
        raise invalid(f"{file}: tensor {name} lies past the file's end: it is cut off; {FETCH_AGAIN}")
    count = 1
    for length in entry.shape:
        count *= length
    if kind in FORMATS and FORMATS[kind].size_of(count) != end - begin:
        raise invalid(
            f"{file}: tensor {name} of {entry.shape} {kind} takes {FORMATS[kind].size_of(count)} bytes, it has {end - begin}; {FETCH_AGAIN}"
        )
    return TensorRecord(name, kind, tuple(entry.shape), file, start + begin, end - begin)


def _chat_template(path: Path, tokenizer_config: dict[str, Any]) -> tuple[str, str] | tuple[None, None]:
    """The template and where it stands."""
    file = path / "chat_template.jinja"
    if file.exists():
        try:
            return file.read_text(encoding="utf-8"), file.name
        except (OSError, UnicodeDecodeError) as error:
            raise invalid(f"{file} cannot be read: {error}") from error
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):
        named = {
            entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict) and isinstance(entry.get("name"), str)
        }
        template = named.get("default")
    return (template, "chat_template in tokenizer_config.json") if isinstance(template, str) else (None, None)


def _special_tokens(
    config: dict[str, Any], generation_config: dict[str, Any], tokenizer_config: dict[str, Any], vocabulary: dict[str, int]
) -> SpecialTokens:
    def text(name: str) -> str | None:
        token = tokenizer_config.get(f"{name}_token")
        token = token.get("content") if isinstance(token, dict) else token
        return token if isinstance(token, str) else None

    def token_id(name: str) -> int | None:
        value = config.get(f"{name}_token_id")
        if value is None:
            return vocabulary.get(text(name) or "")
        return value if value >= 0 else None  # some configs say -1 for none

    ends: list[int] = []
    for value in (generation_config.get("eos_token_id"), config.get("eos_token_id"), vocabulary.get(text("eos") or "")):
        ends += value if isinstance(value, list) else [value] if isinstance(value, int) else []
    return SpecialTokens(
        token_id("bos"), token_id("pad"), token_id("unk"), tuple(dict.fromkeys(ends)), text("bos"), text("eos"), text("pad"), text("unk")
    )


def _vocabulary(tokenizer: Path) -> dict[str, int]:
    """Text → id, for tokens of the model and those added to it."""
    try:
        document = msgspec.convert(_read_json(tokenizer), _TokenizerFile)
    except msgspec.ValidationError as error:
        raise invalid(f"{tokenizer} is no tokenizer file: {error}") from error
    vocabulary = document.model.vocab
    known = {text: index for text, index in vocabulary.items() if isinstance(index, int)} if isinstance(vocabulary, dict) else {}
    return known | {token.content: token.id for token in document.added_tokens}


def _read_json(file: Path) -> dict[str, Any]:
    try:
        document = msgspec.json.decode(file.read_bytes())
    except OSError as error:
        raise invalid(f"{file} cannot be read: {error.strerror}") from error
    except UNREADABLE as error:
        raise invalid(f"{file} is no JSON: {error}; mend it or {FETCH_AGAIN}") from error
    if not isinstance(document, dict):
        raise invalid(f"{file}: expected a JSON object; mend it or {FETCH_AGAIN}")
    return document
