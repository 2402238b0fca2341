"""Damaged files under random fire: whatever the bytes, opening and reading end well or with a `TrivetError` that names the file."""

import json
import re
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file
from trivet_checkpoint import Checkpoint, bundle_of, open_checkpoint
from trivet_proto.errors import TrivetError

HEADER_BYTES = 1000
WIDE = settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
PATCHES = st.lists(st.tuples(st.integers(0, HEADER_BYTES - 1), st.binary(min_size=1, max_size=8)), min_size=1, max_size=4)


def small_gguf(file: Path) -> bytes:
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(["<|end|>", "a", "b", "ab"])
    writer.add_token_types([3, 1, 1, 1])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(True)
    for name, shape in {"token_embd.weight": (4, 32), "blk.0.attn_q.weight": (32, 32), "blk.0.attn_k.weight": (16, 32)}.items():
        writer.add_tensor(name, np.ones(shape, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file.read_bytes()


def patched(content: bytes, patches: list[tuple[int, bytes]]) -> bytes:
    damaged = bytearray(content)
    for place, patch in patches:
        damaged[place : place + len(patch)] = patch
    return bytes(damaged)


def read_all(path: Path) -> Checkpoint:
    checkpoint = open_checkpoint(path)
    bundle_of(checkpoint).to_bytes()
    assert checkpoint.fingerprint
    for name in checkpoint.tensors:
        checkpoint.load(name)
    return checkpoint


def complaint(path: Path, *, otherwise: str) -> str:
    try:
        read_all(path)
    except TrivetError as error:
        return error.message
    return otherwise


@given(patches=PATCHES)
@WIDE
def test_a_damaged_gguf_header_is_read_or_refused(tmp_path: Path, patches: list[tuple[int, bytes]]) -> None:
    content = _remembered(tmp_path)
    file = tmp_path / "damaged.gguf"
    file.write_bytes(patched(content, patches))
    assert "damaged.gguf" in complaint(file, otherwise="damaged.gguf is readable")


def _remembered(folder: Path) -> bytes:
    whole = folder / "whole.gguf"
    return whole.read_bytes() if whole.exists() else small_gguf(whole)


@given(data=st.data())
@WIDE
def test_a_gguf_file_cut_off_anywhere_is_refused(tmp_path: Path, data: st.DataObject) -> None:
    content = _remembered(tmp_path)
    file = tmp_path / "cut.gguf"
    file.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
    with pytest.raises(TrivetError, match=r"cut\.gguf.*fetch it again"):
        read_all(file)


def test_a_gguf_file_that_lacks_its_last_byte_names_the_tensor_and_both_sizes(tmp_path: Path) -> None:
    content = small_gguf(tmp_path / "whole.gguf")
    file = tmp_path / "cut.gguf"
    file.write_bytes(content[:-1])
    with pytest.raises(TrivetError, match=rf"cut\.gguf: tensor blk\.0\.attn_k\.weight \(F32, 2048 bytes at {len(content) - 2048}\)"):
        open_checkpoint(file)


def key(name: str) -> bytes:
    return struct.pack("<Q", len(name)) + name.encode()


@pytest.mark.parametrize(
    ("entry", "value", "why"),
    [
        ("llama.attention.head_count", struct.pack("<II", 4, 0), "llama.attention.head_count is 0, expected one positive whole number"),
        ("llama.attention.head_count", struct.pack("<If", 6, 4.0), "expected one positive whole number"),
        ("llama.attention.head_count", struct.pack("<II", 4, 5), r"attn_q\.weight of shape \[32, 32\] is not made of 5 heads"),
        ("tokenizer.ggml.bos_token_id", struct.pack("<II", 4, 4), "bos_token_id, which is put before texts, is not the id of one of 4"),
        ("tokenizer.ggml.eos_token_id", struct.pack("<II", 4, 4), "eos_token_id is 4, expected the id of one of 4 tokens"),
        ("tokenizer.ggml.eos_token_id", struct.pack("<Ii", 5, -1), "eos_token_id is -1, expected the id of one of 4 tokens"),
        ("llama.context_length", struct.pack("<II", 99, 0), "llama.context_length: value type 99 is not known"),
    ],
    ids=["no heads", "heads of a fraction", "heads of another number", "first token", "last token", "last token below none", "value type"],
)
def test_an_entry_that_makes_no_sense_is_named_with_what_was_expected(tmp_path: Path, entry: str, value: bytes, why: str) -> None:
    content = small_gguf(tmp_path / "m.gguf")
    place = content.index(key(entry)) + len(key(entry))
    (tmp_path / "m.gguf").write_bytes(content[:place] + value + content[place + len(value) :])
    with pytest.raises(TrivetError, match=why):
        open_checkpoint(tmp_path / "m.gguf")


def with_entry(content: bytes, entry: bytes) -> bytes:
    """The file with one more metadata entry, the first of all, and room for the tensors to move with it."""
    (count,) = struct.unpack_from("<Q", content, 16)
    return content[:16] + struct.pack("<Q", count + 1) + entry + content[24:] + bytes(64)


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        (key("split.count") + struct.pack("<IH", 2, 3), "one of 3 parts"),
        (key("llama.expert_count") + struct.pack("<II", 4, 8), "a mixture of 8 experts"),
        (key("llama.rope.scaling.type") + struct.pack("<I", 8) + key("yarn"), "yarn is not known; known are none and linear"),
        (key("llama.rope.dimension_count") + struct.pack("<II", 4, 4), "rope.dimension_count is 4, expected 8, the whole head size"),
        (key("llama.attention.value_length") + struct.pack("<II", 4, 4), "attention.value_length is 4, expected 8, the head size"),
        (key("llama.vocab_size") + struct.pack("<II", 4, 5), "llama.vocab_size is 5, expected 4, the number of tokenizer.ggml.tokens"),
        (key("tokenizer.ggml.eot_token_id") + struct.pack("<II", 4, 9), "eot_token_id is 9, expected the id of one of 4 tokens"),
        (key("tokenizer.chat_template") + struct.pack("<II", 4, 8), "expected a text"),
        (key("general.alignment") + struct.pack("<I", 8) + key("wide"), "general.alignment is 'wide'"),
        (key("deep") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 5000, "the metadata entry deep: arrays within arrays"),
        (key("vast") + struct.pack("<IIQ", 9, 5, 1 << 62), "the metadata entry vast: the file of .* bytes ends before it"),
    ],
    ids=["parts", "experts", "scaling", "part of a head", "values", "vocabulary", "end of turn", "template", "alignment", "deep", "vast"],
)
def test_what_cannot_be_served_from_a_gguf_file_is_refused_at_once(tmp_path: Path, entry: bytes, why: str) -> None:
    content = small_gguf(tmp_path / "m.gguf")
    (tmp_path / "m.gguf").write_bytes(with_entry(content, entry))
    with pytest.raises(TrivetError, match=why):
        open_checkpoint(tmp_path / "m.gguf")


def test_a_tensor_off_the_alignment_is_refused_with_both(tmp_path: Path) -> None:
    content = small_gguf(tmp_path / "m.gguf")
    place = content.index(key("blk.0.attn_k.weight")) + len(key("blk.0.attn_k.weight")) + struct.calcsize("<IQQI")
    (offset,) = struct.unpack_from("<Q", content, place)
    (tmp_path / "m.gguf").write_bytes(content[:place] + struct.pack("<Q", offset - 4) + content[place + 8 :])
    with pytest.raises(
        TrivetError, match=rf"attn_k\.weight lies at {offset - 4}, expected a multiple of general\.alignment, which is 32; fetch"
    ):
        open_checkpoint(tmp_path / "m.gguf")


def test_other_versions_of_the_format_are_refused_but_the_second(tmp_path: Path) -> None:
    content = small_gguf(tmp_path / "m.gguf")
    for version, readable in ((1, False), (2, True), (3, True), (4, False)):
        (tmp_path / "m.gguf").write_bytes(content[:4] + struct.pack("<I", version) + content[8:])
        if readable:
            read_all(tmp_path / "m.gguf")
        else:
            with pytest.raises(TrivetError, match=f"GGUF version {version} cannot be read; known are 2 and 3"):
                open_checkpoint(tmp_path / "m.gguf")


def test_a_file_that_goes_away_after_opening_is_an_error_that_names_the_tensor(tmp_path: Path) -> None:
    small_gguf(tmp_path / "m.gguf")
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    (tmp_path / "m.gguf").unlink()
    with pytest.raises(TrivetError, match=r"m\.gguf: tensor model\.embed_tokens\.weight cannot be read any more"):
        checkpoint.load("model.embed_tokens.weight")


# ---- folders ----


def small_folder(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"vocab_size": 4, "max_position_embeddings": 64}))
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0, "</s>": 1}}, "added_tokens": []}))
    save_file({name: np.ones((2, 3), dtype=np.float32) for name in ("one", "two")}, folder / "model.safetensors")
    return folder


FOLDER_FILES = ("config.json", "tokenizer.json", "model.safetensors")


@given(name=st.sampled_from(FOLDER_FILES), place=st.integers(0, 200), patch=st.binary(min_size=1, max_size=8))
@WIDE
def test_a_damaged_file_of_a_folder_is_read_or_refused(tmp_path: Path, name: str, place: int, patch: bytes) -> None:
    folder = small_folder(tmp_path / "folder")
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(patched(content, [(min(place, len(content) - 1), patch)]))
    assert str(folder) in complaint(folder, otherwise=f"{folder} is readable")


@pytest.mark.parametrize("name", FOLDER_FILES)
def test_a_file_of_a_folder_cut_off_anywhere_is_named(tmp_path: Path, name: str) -> None:
    folder = small_folder(tmp_path / "folder")
    content = (folder / name).read_bytes()
    for length in range(len(content)):
        (folder / name).write_bytes(content[:length])
        with pytest.raises(TrivetError, match=f"{re.escape(name)}.*fetch it again"):
            read_all(folder)


@pytest.mark.parametrize(
    ("index", "why"),
    [
        ({"weight_map": {"one": "model.safetensors", "three": "model.safetensors"}}, "tensor three is missing, .* places it there"),
        ({"weight_map": {"one": "gone.safetensors"}}, r"gone\.safetensors cannot be read"),
        ({"weight_map": [1]}, "weight_map must name a file for each tensor"),
        ({}, "weight_map must name a file for each tensor"),
    ],
)
def test_an_index_that_does_not_fit_its_files_is_refused(tmp_path: Path, index: dict[str, object], why: str) -> None:
    folder = small_folder(tmp_path / "folder")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(TrivetError, match=why):
        open_checkpoint(folder)


def test_a_tensor_of_a_kind_that_is_not_read_is_named_when_it_is_wanted(tmp_path: Path) -> None:
    folder = small_folder(tmp_path / "folder")
    save_file({"one": np.ones(3, dtype=np.int64)}, folder / "model.safetensors")
    with pytest.raises(TrivetError, match=r"model\.safetensors: tensor one: tensors stored as I64 cannot be read"):
        open_checkpoint(folder).load("one")
