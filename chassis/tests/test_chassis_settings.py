"""Settings: order of sources, what values may look like, and what a person reads when something is wrong."""

import contextlib
import enum
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from trivet_chassis.settings import ByteSize, Loaded, Setting, explain, load_settings, nearest, parse_size
from trivet_proto.errors import ErrorKind, TrivetError


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    model: Annotated[str | None, Setting(help="the model to serve", positional=True)] = None
    max_num_seqs: Annotated[int, Setting(help="requests that run at one time", minimum=1, maximum=1000)] = 64
    share: Annotated[float, Setting(help="part of the memory, 100 % is 1", minimum=0, maximum=1)] = 0.9
    enable_cache: Annotated[bool, Setting(help="keep what was computed")] = True
    dtype: Annotated[Literal["auto", "float32"], Setting(help="number type")] = "auto"
    level: Annotated[Literal[1, 2], Setting(help="effort")] = 1
    colour: Annotated[Colour, Setting(help="of the shed")] = Colour.RED
    policy: Annotated[str, Setting(help="order of requests", choices=("fcfs", "priority"))] = "fcfs"
    names: Annotated[tuple[str, ...], Setting(help="names it answers to")] = ()
    sizes: Annotated[tuple[int, ...], Setting(help="graph sizes")] = (1, 2)
    cache: Annotated[ByteSize | None, Setting(help="memory of the cache")] = None
    body: Annotated[int, Setting(help="largest body", unit="bytes", minimum=1024)] = 2048
    limit: Annotated[float | None, Setting(help="time", unit="seconds")] = None
    api_key: Annotated[tuple[str, ...], Setting(help="keys of callers", secret=True)] = ()
    pin: Annotated[int | None, Setting(help="a secret number", secret=True, minimum=1000)] = None


class Demanding(msgspec.Struct, frozen=True, kw_only=True):
    target: Annotated[str, Setting(help="whom to dial")]
    source: Annotated[str, Setting(help="what to read", positional=True)] = ""


def load(argv: Sequence[str] = (), environ: Mapping[str, str] | None = None) -> Loaded[Settings]:
    return load_settings(Settings, section="worker", prog="prog", description="What it does.", argv=argv, environ=environ or {})


def refusal(argv: Sequence[str] = (), environ: Mapping[str, str] | None = None) -> str:
    with pytest.raises(TrivetError) as caught:
        load(argv, environ)
    assert caught.value.kind is ErrorKind.INVALID_ARGUMENT
    assert "\n" not in caught.value.message
    return caught.value.message


def test_defaults_stand_when_nothing_is_given() -> None:
    loaded = load()
    assert loaded.value == Settings()
    assert set(loaded.origins.values()) == {"default"}
    assert list(loaded.origins) == list(Settings.__struct_fields__)


def test_the_command_line_wins_over_the_environment_which_wins_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "trivet.toml"
    file.write_text("[worker]\nmax-num-seqs = 1\nshare = 0.1\ndtype = 'float32'\n[scheduler]\nwhatever = 1\n")
    loaded = load(["--config", str(file), "--max-num-seqs", "3"], {"TRIVET_WORKER_MAX_NUM_SEQS": "2", "TRIVET_WORKER_SHARE": "0.2"})
    assert (loaded.value.max_num_seqs, loaded.value.share, loaded.value.dtype) == (3, 0.2, "float32")
    assert loaded.origins["max_num_seqs"] == "flag --max-num-seqs"
    assert loaded.origins["share"] == "env TRIVET_WORKER_SHARE"
    assert loaded.origins["dtype"] == f"file {file}"
    assert loaded.origins["level"] == "default"


def test_the_file_may_be_named_by_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "trivet.toml"
    file.write_text("[worker]\nlevel = 2\n")
    assert load([], {"TRIVET_CONFIG": str(file)}).value.level == 2


@pytest.mark.parametrize(
    "argv",
    [
        ["m.gguf", "--level", "2", "--no-enable-cache"],
        ["--level", "2", "m.gguf", "--no-enable-cache"],
        ["--level=2", "--no-enable-cache", "m.gguf"],
    ],
)
def test_a_positional_argument_may_stand_anywhere(argv: list[str]) -> None:
    loaded = load(argv)
    assert (loaded.value.model, loaded.value.level, loaded.value.enable_cache) == ("m.gguf", 2, False)
    assert loaded.origins["model"] == "argument MODEL"


def test_a_positional_argument_given_as_a_flag_is_explained() -> None:
    assert refusal(["--model", "m.gguf"]) == "--model: MODEL is given without a flag, as in prog MODEL"


def test_two_positional_arguments_are_refused() -> None:
    assert refusal(["one", "two"]).startswith("two is not known to prog")


@pytest.mark.parametrize(
    ("field", "text", "value"),
    [
        ("max_num_seqs", "7", 7),
        ("share", "0.5", 0.5),
        ("share", "1", 1.0),
        ("enable_cache", "OFF", False),
        ("enable_cache", "yes", True),
        ("level", "2", 2),
        ("colour", "blue", Colour.BLUE),
        ("policy", "priority", "priority"),
        ("names", "a, b,,c", ("a", "b", "c")),
        ("names", "", ()),
        ("sizes", "4,8", (4, 8)),
        ("cache", "2GiB", 2 << 30),
        ("cache", "", None),
        ("body", "1.5 kib", 1536),
        ("limit", "2.5", 2.5),
        ("limit", "", None),
        ("pin", "1234", 1234),
    ],
)
def test_texts_become_values_of_the_type(field: str, text: str, value: object) -> None:
    loaded = load([], {f"TRIVET_WORKER_{field.upper()}": text})
    assert getattr(loaded.value, field) == value
    assert type(getattr(loaded.value, field)) is type(value)


@pytest.mark.parametrize(
    ("toml", "field", "value"),
    [
        ("share = 1", "share", 1.0),
        ("names = ['a', 'b']", "names", ("a", "b")),
        ("names = 'a,b'", "names", ("a", "b")),
        ("sizes = [3]", "sizes", (3,)),
        ("cache = '1MiB'", "cache", 1 << 20),
        ("cache = 5", "cache", 5),
        ("enable_cache = false", "enable_cache", False),
        ("level = 2", "level", 2),
    ],
)
def test_a_file_may_use_types_of_its_own(tmp_path: Path, toml: str, field: str, value: object) -> None:
    file = tmp_path / "trivet.toml"
    file.write_text(f"[worker]\n{toml}\n")
    assert getattr(load(["--config", str(file)]).value, field) == value


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--max-num-seqs", "0"], "--max-num-seqs: 0 is below 1"),
        (["--max-num-seqs", "-5"], "--max-num-seqs: -5 is below 1"),
        (["--max-num-seqs", "1001"], "--max-num-seqs: 1001 is above 1000"),
        (["--max-num-seqs", "ten"], "--max-num-seqs: 'ten' is not a whole number"),
        (["--max-num-seqs", "1.5"], "--max-num-seqs: '1.5' is not a whole number"),
        (["--share", "nan"], "--share: 'nan' is not a number"),
        (["--share", "inf"], "--share: 'inf' is not a number"),
        (["--dtype", "float16"], "--dtype: 'float16' is not one of auto, float32"),
        (["--colour", "RED"], "--colour: 'RED' is not one of red, blue"),
        (["--policy", "lifo"], "--policy: 'lifo' is not one of fcfs, priority"),
        (["--sizes", "1,x"], "--sizes: '1,x' is not a list of whole numbers, separated by commas"),
        (["--cache", "2GX"], "--cache: '2GX' is not a size such as 512MiB or 2GiB ('GX' is no unit of size: use B, KiB, MiB, GiB, TiB)"),
        (["--cache=-1GiB"], "--cache: '-1GiB' is not a size such as 512MiB or 2GiB (write a number and a unit)"),
        (["--body", "1KB"], "--body: 1KB is below 1024"),
    ],
)
def test_a_wrong_value_is_named_with_what_would_be_right(argv: list[str], message: str) -> None:
    assert refusal(argv) == message


def test_wrong_values_name_the_place_where_they_were_written(tmp_path: Path) -> None:
    assert refusal([], {"TRIVET_WORKER_ENABLE_CACHE": "perhaps"}) == "TRIVET_WORKER_ENABLE_CACHE: 'perhaps' is not true or false"
    file = tmp_path / "trivet.toml"
    file.write_text("[worker]\nmax-num-seqs = true\n")
    assert refusal(["--config", str(file)]) == f"max-num-seqs in {file}: True is not a whole number"
    file.write_text("[worker]\nenable_cache = 1\n")
    assert refusal(["--config", str(file)]) == f"enable_cache in {file}: 1 is not true or false"
    file.write_text("[worker]\ncache = -1\n")
    assert "is not a size" in refusal(["--config", str(file)])


def test_unknown_keys_are_errors_with_the_nearest_known_one(tmp_path: Path) -> None:
    assert (
        refusal(["--max-num-seq", "3"]) == "--max-num-seq is not known to prog; did you mean --max-num-seqs?; prog --help lists the flags"
    )
    assert refusal(["--no-enable-cash"]).startswith("--no-enable-cash is not known to prog; did you mean --no-enable-cache?")
    assert "did you mean" not in refusal(["--zzz=3"])
    assert refusal([], {"TRIVET_WORKER_SHARES": "1"}) == (
        "the environment variable TRIVET_WORKER_SHARES is not known; did you mean TRIVET_WORKER_SHARE?"
    )
    assert refusal([], {"TRIVET_CPU_ISA": "sse9"}) == (
        "the environment variable TRIVET_CPU_ISA is 'sse9'; it is one of plain, avx2, avx512, amx"
    )
    assert "TRIVET_WROKER_SHARE" in refusal([], {"TRIVET_WROKER_SHARE": "1"})
    file = tmp_path / "trivet.toml"
    file.write_text("[worker]\nshaer = 1\n")
    assert refusal(["--config", str(file)]) == f"{file}: shaer is not a setting of [worker]; did you mean share?"
    file.write_text("[wroker]\n")
    assert f"{file}: [wroker] is not known; did you mean worker?" in refusal(["--config", str(file)])


def test_abbreviated_flags_are_not_guessed() -> None:
    assert "--max" in refusal(["--max", "3"])


def test_variables_of_other_services_and_other_programs_are_let_be() -> None:
    assert load([], {"TRIVET_SCHEDULER_X": "1", "PATH": "/bin"}).value == Settings()


def test_a_file_that_cannot_be_read_is_explained(tmp_path: Path) -> None:
    assert "cannot be read: No such file or directory" in refusal(["--config", str(tmp_path / "none.toml")])
    assert "cannot be read: Is a directory" in refusal(["--config", str(tmp_path)])
    file = tmp_path / "broken.toml"
    file.write_text("[worker\n")
    assert "is not TOML" in refusal(["--config", str(file)])
    file.write_bytes(b"\xff\xfe")
    assert "is not TOML" in refusal(["--config", str(file)])
    file.write_text("worker = 3\n")
    assert "worker must be a table" in refusal(["--config", str(file)])


def test_a_flag_without_its_value_is_explained() -> None:
    assert "--share: expected one argument" in refusal(["--share"])


def test_what_has_no_default_is_asked_for() -> None:
    with pytest.raises(TrivetError, match=r"^--target is needed: whom to dial$"):
        load_settings(Demanding, section="worker", prog="prog", description="", argv=[], environ={})


def test_the_description_shows_values_and_origins_and_hides_secrets() -> None:
    loaded = load(["--share", "0.5"], {"TRIVET_WORKER_API_KEY": "s3cret", "TRIVET_WORKER_PIN": "4711"})
    lines = loaded.describe().splitlines()
    assert len(lines) == len(Settings.__struct_fields__)
    assert "share = 0.5  [flag --share]" in lines
    assert "api_key = (hidden)  [env TRIVET_WORKER_API_KEY]" in lines
    assert "s3cret" not in loaded.describe()
    assert "4711" not in loaded.describe()


@pytest.mark.parametrize("text", ["hunter2", "12"])
def test_a_refused_secret_is_not_shown(text: str) -> None:
    with pytest.raises(TrivetError) as caught:
        load([], {"TRIVET_WORKER_PIN": text})
    assert text not in caught.value.message
    assert caught.value.__cause__ is None


def test_help_is_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load(["--help"])
    assert caught.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for wanted in (
        "What it does.",
        "MODEL the model to serve",
        "requests that run at one time (default 64)",
        "part of the memory, 100 % is 1 (default 0.9)",
        "--enable-cache, --no-enable-cache keep what was computed (default true)",
        "--dtype {auto,float32}",
        "--colour {red,blue} of the shed (default red)",
        "--policy {fcfs,priority}",
        "graph sizes (default 1,2)",
        "memory of the cache (bytes)",
        "TRIVET_WORKER_<NAME>",
        "--config FILE",
    ):
        assert wanted in text


def test_explain_is_one_line() -> None:
    assert explain(TrivetError(ErrorKind.INVALID_ARGUMENT, "no")) == "configuration: no"


def test_nearest_says_nothing_when_nothing_is_near() -> None:
    assert nearest("abc", ["xyz"]) == ""


@given(st.integers(0, 2**62), st.sampled_from([("", 1), ("B", 1), ("kib", 1 << 10), ("MiB", 1 << 20), ("GB", 10**9), ("TIB", 1 << 40)]))
def test_whole_sizes_are_exact(number: int, unit: tuple[str, int]) -> None:
    assert parse_size(f"{number}{unit[0]}") == number * unit[1]
    assert parse_size(f" {number} {unit[0]} ") == number * unit[1]


@given(st.text(max_size=8))
def test_any_text_is_a_size_or_a_value_error(text: str) -> None:
    with contextlib.suppress(ValueError):
        assert parse_size(text) >= 0


@given(
    st.text(max_size=20), st.sampled_from(["max_num_seqs", "share", "enable_cache", "dtype", "level", "sizes", "cache", "body", "limit"])
)
def test_any_text_is_a_value_or_a_trivet_error(text: str, field: str) -> None:
    with contextlib.suppress(TrivetError):
        loaded = load([], {f"TRIVET_WORKER_{field.upper()}": text})
        assert loaded.origins[field] == f"env TRIVET_WORKER_{field.upper()}"
