"""The flags of `trivet serve`: vLLM's names, near misses, files and variables, and an owner for each."""

from pathlib import Path

import msgspec
import pytest
from trivet.launch.ownership import EVERY_SERVICE, LAUNCHER_OWN, OWNERS
from trivet.launch.settings import ServeSettings, load_serve_settings
from trivet_proto.errors import TrivetError

FLAGS = """
    --dtype=float32 --max-model-len=512 --served-model-name=a,b --chat-template=t.jinja --api-key=k --root-path=/x --uds=/run/x
    --block-size=16 --max-num-seqs=8 --max-num-batched-tokens=64 --host=::1 --port=9000 --num-kv-blocks=100 --kv-cache-memory=1GiB
    --no-enable-prefix-caching --generation-config=neutral --load-format=dummy
"""


def test_flags_have_the_names_that_a_vllm_user_knows() -> None:
    settings = load_serve_settings(["/a/model", *FLAGS.split()], {}, prog="trivet serve")
    assert settings.value.model == "/a/model"
    assert settings.value.served_model_name == ("a", "b")
    assert settings.value.enable_prefix_caching is False
    assert settings.origins["dtype"] == "flag --dtype"


def test_every_setting_has_an_owner() -> None:
    names = {field.name for field in msgspec.structs.fields(ServeSettings)}
    assert names == set(OWNERS) | LAUNCHER_OWN
    assert not set(OWNERS) & LAUNCHER_OWN
    assert all(set(owners) <= set(EVERY_SERVICE) for owners in OWNERS.values())


def test_a_setting_that_only_a_service_has_is_told_with_its_way() -> None:
    for flag, variable in (("--watermark", "TRIVET_SCHEDULER_WATERMARK"), ("--spin=5", "TRIVET_WORKER_SPIN")):
        with pytest.raises(TrivetError, match=variable):
            load_serve_settings([flag, "3"], {}, prog="trivet serve")


def test_a_native_variable_is_no_unknown_setting() -> None:
    assert load_serve_settings([], {"TRIVET_CPU_ISA": "avx2"}, prog="trivet serve").value.workers == 1


def test_a_near_miss_is_named() -> None:
    with pytest.raises(TrivetError, match=r"--max-modl-len is not known to trivet serve; did you mean --max-model-len\?"):
        load_serve_settings(["--max-modl-len", "3"], {}, prog="trivet serve")


@pytest.mark.parametrize("flag", ["--tool-call-parser", "--reasoning-parser"])
def test_what_is_not_there_yet_is_refused(flag: str) -> None:
    with pytest.raises(TrivetError, match=f"{flag} is not known"):
        load_serve_settings([flag, "hermes"], {}, prog="trivet serve")


@pytest.mark.parametrize("words", [["--config", "{}"], ["--config={}"]])
def test_the_configuration_file_is_known_for_the_services(tmp_path: Path, words: list[str]) -> None:
    file = tmp_path / "trivet.toml"
    file.write_text('[serve]\nport = 9001\n[worker]\ndtype = "float32"\n')
    settings = load_serve_settings([word.format(file) for word in words], {}, prog="trivet serve")
    assert settings.config_file == str(file)
    assert settings.value.port == 9001
    assert load_serve_settings([], {"TRIVET_CONFIG": str(file)}, prog="trivet serve").config_file == str(file)
    assert load_serve_settings([], {}, prog="trivet serve").config_file is None
