"""Files of models: GGUF and folders, whole and broken."""

import json
from functools import cache
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer
from trivet_checkpoint import open_checkpoint, resolve_model
from trivet_checkpoint.checkpoint import halves_apart
from trivet_proto.errors import TrivetError

HEADS, KV_HEADS, SIZE, HIDDEN = 4, 2, 8, 32


def rotary_pairs(rows: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k: each head's halves are interleaved."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def write_gguf(
    path: Path,
    *,
    architecture: str = "llama",
    output: bool = False,
    add_bos: bool | None = False,
    pre: str = "smollm",
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(5)
    tokens = ["<|end|>", "<|start|>", *"abcdefghijklmnopqrstuvwxyz0123456789", "ab"]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(64)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(5000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, *[1] * (len(tokens) - 2)])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    if add_bos is not None:
        writer.add_add_bos_token(add_bos)
    tensors = {
        "token_embd.weight": rng.normal(size=(len(tokens), HIDDEN)),
        "output_norm.weight": np.ones(HIDDEN),
        "blk.0.attn_q.weight": rng.normal(size=(HEADS * SIZE, HIDDEN)),
        "blk.0.attn_k.weight": rng.normal(size=(KV_HEADS * SIZE, HIDDEN)),
        "blk.0.attn_v.weight": rng.normal(size=(KV_HEADS * SIZE, HIDDEN)),
        "blk.0.attn_q.bias": rng.normal(size=HEADS * SIZE),
        "rope_freqs.weight": np.ones(SIZE // 2),
        "only.llama_cpp.knows": np.ones(3),
    }
    if output:
        tensors["output.weight"] = rng.normal(size=(len(tokens), HIDDEN))
    tensors = {name: values.astype(np.float32) for name, values in tensors.items()}
    for name, values in tensors.items():
        stored = values
        if architecture == "llama" and ("attn_q" in name or "attn_k" in name):
            stored = rotary_pairs(values, HEADS if "attn_q" in name else KV_HEADS)
        if values.ndim == 1:
            writer.add_tensor(name, stored)
        else:
            writer.add_tensor(name, gguf.quants.quantize(stored, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_q_and_k_come_in_hugging_face_order_whether_the_converter_moved_them_or_not(tmp_path: Path, architecture: str) -> None:
    tensors = write_gguf(tmp_path / "m.gguf", architecture=architecture, pre="smollm" if architecture == "llama" else "qwen2")
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    for ours, theirs in (("q", "attn_q"), ("k", "attn_k"), ("v", "attn_v")):
        assert np.array_equal(checkpoint.load(f"model.layers.0.self_attn.{ours}_proj.weight"), tensors[f"blk.0.{theirs}.weight"])
    assert np.array_equal(checkpoint.load("model.layers.0.self_attn.q_proj.bias"), tensors["blk.0.attn_q.bias"])
    assert checkpoint.config["attention_bias"]
    assert not checkpoint.config["mlp_bias"]


@pytest.mark.parametrize(("kind", "least"), [("F16", 0.99999), ("BF16", 0.9999), ("Q8_0", 0.99), ("Q4_1", 0.98), ("Q5_0", 0.98)])
def test_weights_point_where_the_original_does_in_every_row(tmp_path: Path, kind: str, least: float) -> None:
    tensors = write_gguf(tmp_path / "m.gguf", kind=gguf.GGMLQuantizationType[kind])
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    names = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v"}
    for ours, theirs in {f"model.layers.0.self_attn.{a}.weight": f"blk.0.{b}.weight" for a, b in names.items()}.items():
        assert checkpoint.tensors[ours].kind == kind
        loaded, original = checkpoint.load(ours), tensors[theirs]
        cosines = (loaded * original).sum(1) / (np.linalg.norm(loaded, axis=1) * np.linalg.norm(original, axis=1))
        assert cosines.min() > least


def test_halves_apart_undoes_pairs_side_by_side() -> None:
    rows = np.arange(48, dtype=np.float32).reshape(24, 2)
    assert np.array_equal(halves_apart(rotary_pairs(rows, 3), 3), rows)


@pytest.mark.parametrize("output", [False, True])
def test_the_head_is_tied_exactly_when_the_file_has_none(tmp_path: Path, output: bool) -> None:
    write_gguf(tmp_path / "m.gguf", output=output)
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    assert checkpoint.config["tie_word_embeddings"] is not output
    assert ("lm_head.weight" in checkpoint.tensors) is output
    assert checkpoint.config["rope_theta"] == 5000.0
    assert "model.rope_factors" in checkpoint.tensors


@pytest.mark.parametrize("add_bos", [False, True])
def test_a_first_token_is_added_only_where_the_model_wants_it(tmp_path: Path, add_bos: bool) -> None:
    write_gguf(tmp_path / "m.gguf", add_bos=add_bos)
    tokenizer = Tokenizer.from_buffer(open_checkpoint(tmp_path / "m.gguf").tokenizer_json())
    assert tokenizer.encode("ab1").tokens == (["<|start|>"] if add_bos else []) + ["ab", "1"]


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("smollm", "It's  2024!\n\nOk", ["It", "'s", "ĠĠ", "2", "0", "2", "4", "!", "Ċ", "Ċ", "Ok"]),
        ("gpt-2", "It's  2024!\n\nOk", ["It", "'s", "Ġ", "Ġ2024", "!", "Ċ", "Ċ", "Ok"]),
        ("llama-bpe", "IT'S  2024!\n\nOk", ["IT", "'S", "Ġ", "Ġ", "202", "4", "!ĊĊ", "Ok"]),
        ("qwen2", "IT'S  2024!\n\nOk", ["IT", "'S", "Ġ", "Ġ", "2", "0", "2", "4", "!ĊĊ", "Ok"]),
    ],
)
def test_each_pre_tokenizer_cuts_texts_in_its_own_way(tmp_path: Path, pre: str, text: str, pieces: list[str]) -> None:
    write_gguf(tmp_path / "m.gguf", pre=pre)
    tokenizer = Tokenizer.from_buffer(open_checkpoint(tmp_path / "m.gguf").tokenizer_json())
    assert [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)] == pieces


@pytest.mark.parametrize(("pre", "adds"), [("llama-bpe", True), ("qwen2", False), ("gpt-2", False)])
def test_a_file_that_does_not_speak_of_a_first_token_means_what_its_pre_tokenizer_means(tmp_path: Path, pre: str, adds: bool) -> None:
    write_gguf(tmp_path / "m.gguf", pre=pre, add_bos=None)
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    assert checkpoint.tokenizer_config["add_bos_token"] is adds
    assert Tokenizer.from_buffer(checkpoint.tokenizer_json()).encode("ab").tokens == ["<|start|>"] * adds + ["ab"]


def test_a_file_cut_off_anywhere_is_an_error_that_names_it(tmp_path: Path) -> None:
    whole = tmp_path / "whole.gguf"
    write_gguf(whole)
    data = whole.read_bytes()
    for length in [0, 1, 3, 4, 10, 23, 24, 60, 200, 500, 1000, len(data) // 2, len(data) - 200]:
        cut = tmp_path / "cut.gguf"
        cut.write_bytes(data[:length])
        with pytest.raises(TrivetError, match=r"cut\.gguf"):
            open_checkpoint(cut)


def test_random_bytes_after_the_magic_are_an_error_not_a_crash(tmp_path: Path) -> None:
    rng = np.random.default_rng(9)
    file = tmp_path / "odd.gguf"
    for _ in range(50):
        file.write_bytes(b"GGUF\x03\x00\x00\x00" + rng.integers(0, 256, size=300, dtype=np.uint8).tobytes())
        with pytest.raises(TrivetError, match=r"odd\.gguf"):
            open_checkpoint(file)


def test_a_foreign_file_says_what_was_expected(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"PK\x03\x04 a zip file")
    with pytest.raises(TrivetError, match="begins with b'PK"):
        open_checkpoint(tmp_path / "x.gguf")


def test_an_unknown_pre_tokenizer_is_refused_with_those_known(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", pre="tekken")
    with pytest.raises(TrivetError, match=r"tekken.*smollm"):
        open_checkpoint(tmp_path / "m.gguf")


# ---- folders ----


@cache
def default_tokenizer() -> bytes:
    return open_checkpoint(resolve_model(None)).tokenizer_json()


def write_folder(path: Path, *, sharded: bool = False, **config: object) -> dict[str, np.ndarray]:
    (path / "tokenizer.json").write_bytes(default_tokenizer())
    document = {"architectures": ["LlamaForCausalLM"], "vocab_size": 49152, "max_position_embeddings": 128, "eos_token_id": 2, **config}
    (path / "config.json").write_text(json.dumps(document))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0], "temperature": 0.6}))
    (path / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": {"content": "<|im_start|>"}, "eos_token": "<|im_end|>", "chat_template": "{{ messages }}"})
    )
    tensors = {f"model.{index}.weight": np.full((2, 3), index, dtype=np.float32) for index in range(4)}
    if not sharded:
        save_file(tensors, path / "model.safetensors")
        return tensors
    shards = {"a.safetensors": list(tensors)[:2], "b.safetensors": list(tensors)[2:]}
    for file, names in shards.items():
        save_file({name: tensors[name] for name in names}, path / file)
    weight_map = {name: file for file, names in shards.items() for name in names}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return tensors


@pytest.mark.parametrize("sharded", [False, True])
def test_a_folder_gives_its_tensors_config_and_tokens(tmp_path: Path, sharded: bool) -> None:
    tensors = write_folder(tmp_path, sharded=sharded, rope_parameters={"rope_theta": 1234.0, "rope_type": "default"})
    checkpoint = open_checkpoint(tmp_path)
    for name, values in tensors.items():
        assert np.array_equal(checkpoint.load(name), values)
    assert checkpoint.config["rope_theta"] == 1234.0
    assert checkpoint.config["rope_scaling"] is None
    assert checkpoint.special_tokens.eos_ids == (2, 0)
    assert (checkpoint.special_tokens.bos, checkpoint.special_tokens.bos_id) == ("<|im_start|>", 1)
    assert (checkpoint.chat_template, checkpoint.chat_template_place) == ("{{ messages }}", "chat_template in tokenizer_config.json")
    assert checkpoint.generation_config["temperature"] == 0.6


def test_a_config_that_does_not_speak_of_tying_is_tied_when_there_is_no_other_head(tmp_path: Path) -> None:
    tensors = write_folder(tmp_path)
    assert open_checkpoint(tmp_path).config["tie_word_embeddings"] is True
    save_file(tensors | {"lm_head.weight": np.ones((2, 3), dtype=np.float32)}, tmp_path / "model.safetensors")
    assert open_checkpoint(tmp_path).config["tie_word_embeddings"] is False
    write_folder(tmp_path, tie_word_embeddings=False)
    assert open_checkpoint(tmp_path).config["tie_word_embeddings"] is False


def test_a_folder_is_called_what_its_directory_is(tmp_path: Path) -> None:
    write_folder(tmp_path)
    assert open_checkpoint(tmp_path).name == tmp_path.name
    assert "_name" not in open_checkpoint(tmp_path).config


def test_a_template_file_goes_before_the_tokenizers_own(tmp_path: Path) -> None:
    write_folder(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("mine")
    checkpoint = open_checkpoint(tmp_path)
    assert (checkpoint.chat_template, checkpoint.chat_template_place) == ("mine", "chat_template.jinja")


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_file_is_named(tmp_path: Path, missing: str) -> None:
    write_folder(tmp_path)
    (tmp_path / missing).unlink()
    with pytest.raises(TrivetError, match=missing.replace("model.safetensors", "safetensors").replace(".", r"\.")):
        open_checkpoint(tmp_path)


def test_a_torn_safetensors_file_is_named_with_its_tensor(tmp_path: Path) -> None:
    write_folder(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(TrivetError, match=r"model\.safetensors: tensor model\.3\.weight"):
        open_checkpoint(tmp_path)


def test_what_is_no_model_says_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(TrivetError, match="GGUF file or a Hugging Face folder"):
        resolve_model("some-org/some-model")
    with pytest.raises(TrivetError, match=r"no config\.json"):
        resolve_model(str(tmp_path))
    write_gguf(tmp_path / "only.gguf")
    assert resolve_model(str(tmp_path)) == tmp_path / "only.gguf"
