"""`trivet bench limits` and `kernels` in a small size, and the bounds by hand."""

import json
from pathlib import Path

import pytest
from trivet.__main__ import main
from trivet.bench.limits import layer_shapes
from trivet.bench.load.workloads import WORKLOADS, Overrides
from trivet.bench.machine.bounds import FORMATS, LIBRARY, Limits, bound
from trivet.bench.machine.caches import cache_bytes
from trivet.bench.machine.model_dimensions import ModelDimensions
from trivet_kernels.cpu.library import NotBuilt, native_library

PNG = b"\x89PNG\r\n\x1a\n"
SMALL = ModelDimensions("small", layers=2, hidden=64, heads=4, kv_heads=2, head_size=32, inner=96, vocab=100)
LAYER = 256 * 64 + 64 * 128 + 192 * 64 + 64 * 96  # qkv, output, gate and up, down
FORMAT = {form.name: form for form in FORMATS}

try:
    native_library()
    REASON = ""
except NotBuilt as reason:
    REASON = str(reason)
built = pytest.mark.skipif(bool(REASON), reason=REASON)


def test_a_models_sizes_are_those_of_its_weights() -> None:
    assert SMALL.layer_values == 2 * LAYER
    assert SMALL.head_values == 6400
    assert SMALL.kv_values() == 2 * 2 * 2 * 32
    assert SMALL.attention_operations(10) == 2 * 4 * 4 * 32 * 10


def test_one_stream_is_bound_by_reading_the_weights_once_a_token() -> None:
    workload = Overrides(requests=1, input_tokens=1, output_tokens=11).apply(WORKLOADS["W1"])
    weights = 2 * (2 * LAYER + 6400)
    got = bound(workload, SMALL, FORMAT["bfloat16"], Limits(read=weights, operations={"float32": 1e15, "bfloat16": 1e15, "int8": 1e15}))
    # A second for each step's weights, and a little for six tokens of context.
    assert got.step_seconds == pytest.approx(1 + 2 * 256 * 6 / weights)
    assert got.prompt_seconds == pytest.approx(1)
    assert got.output_tokens_per_s == pytest.approx(11 / (1 + 10 * got.step_seconds))


def test_many_prompts_are_bound_by_their_operations_and_what_they_share_counts_once() -> None:
    limits = Limits(read=1e15, operations={"float32": 1e6, "bfloat16": 3e6, "int8": 2e6})
    apart, shared = (
        bound(
            Overrides(concurrency=4, requests=4, shared_tokens=s, input_tokens=i, output_tokens=1).apply(WORKLOADS["W3"]),
            SMALL,
            form,
            limits,
        )
        for s, i, form in ((0, 96, FORMAT["int8"]), (64, 32, FORMAT["int8"]))
    )
    # int8 is held to the quicker of its own and wider instructions: bfloat16's here.
    operations = 2 * (4 * 96 * 2 * LAYER + 4 * 6400) + 1024 * 4 * (96 * 97 // 2)
    assert apart.prompt_seconds == pytest.approx(operations / 3e6)
    assert apart.prompt_seconds / shared.prompt_seconds == pytest.approx(4 * 96 / (64 + 4 * 32), rel=0.1)
    assert shared.total_tokens_per_s == pytest.approx(4 * 97 / shared.seconds)


def test_the_caches_have_sizes() -> None:
    second, third = cache_bytes()
    assert 1 << 16 < second < third


def test_torch_multiplies_by_all_layers_or_by_as_many_as_were_asked_for() -> None:
    layer = [(256, 64), (64, 128), (192, 64), (64, 96)]
    assert layer_shapes(SMALL, 1 << 40) == 2 * layer
    assert layer_shapes(SMALL, 3 * LAYER) == layer_shapes(SMALL, 0) == layer


@built
def test_limits_are_measured_shown_written_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, plot = tmp_path / "limits.json", tmp_path / "limits.png"
    flags = ("--threads", "2", "--rounds", "3", "--round-time", "0.001", "--memory", "8", "--workload", "W1,W2,W4")
    assert main(["bench", "limits", *flags, "--json", str(file), "--plot", str(plot)]) == 0
    content = json.loads(file.read_text())
    assert (content["schema"], content["command"], content["threads"]) == (1, "limits", 2)
    assert {(each["level"], each["threads"]) for each in content["reads"]} == {(n, t) for n in ("L2", "L3", "memory") for t in (1, 2)}
    assert {(each["format"], each["threads"]) for each in content["products"]} == {(n, t) for n in (*FORMAT_KINDS, LIBRARY) for t in (1, 2)}
    assert all(each["gb_per_s"] > 0 for each in content["reads"])
    assert all(each["gops_per_s"] > 0 for each in content["products"])
    assert content["meeting_s"] > 0
    assert {(each["format"], each["workload"]) for each in content["bounds"]} == {(f, w) for f in FORMAT for w in ("W1", "W2", "W4")}
    assert plot.read_bytes().startswith(PNG)
    assert "bounds for" in capsys.readouterr().out


FORMAT_KINDS = ("float32", "bfloat16", "int8")


@built
def test_kernels_are_timed_at_every_size_that_fits_the_memory_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trivet.bench.kernels.read_dimensions", lambda _: SMALL)
    file, plot = tmp_path / "kernels.json", tmp_path / "kernels.png"
    flags = ("--threads", "2", "--formats", "q4_1", "--rows", "1,17", "--sequences", "1,2", "--contexts", "32,9000", "--prompts", "40")
    small = ("--attention-sequences", "1", "--attention-context", "64", "--memory", "4", "--rounds", "1")
    assert main(["bench", "kernels", *flags, *small, "--json", str(file), "--plot", str(plot)]) == 0
    content = json.loads(file.read_text())
    assert [(each["name"], each["rows"]) for each in content["products"]] == [
        (name, rows) for name in ("qkv", "output", "gate and up", "down", "head") for rows in (1, 17)
    ]
    for each in content["products"] + content["attention"]:
        assert each["seconds"] > 0
        assert each["read_share"] > 0
        assert each["operations_share"] > 0
    steps = {(each["sequences"], each["context"], each["new"]): each["seconds"] for each in content["steps"]}
    assert {size for size, seconds in steps.items() if seconds is None} == {(1, 9000, 1), (2, 9000, 1)}
    assert {size for size, seconds in steps.items() if seconds} == {(1, 32, 1), (2, 32, 1), (1, 0, 40)}
    assert plot.read_bytes().startswith(PNG)
    assert "decode steps, q4_1" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["limits", "kernels"])
def test_an_instruction_set_that_nobody_knows_is_a_readable_line(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRIVET_CPU_ISA", "sse9")
    assert main(["bench", name]) == 2
    assert "TRIVET_CPU_ISA is 'sse9'; it is one of plain, avx2, avx512, amx" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["limits", "--threads", "0"], "--threads 0: more than 0 is wanted"),
        (["limits", "--threads", "9999"], "only wait for each other"),
        (["kernels", "--threads", "9999"], "only wait for each other"),
        (["kernels", "--formats", "q3"], "--formats q3 is not known"),
        (["kernels", "--only", "product"], "--only product is not known"),
        (["kernels", "--rows", "0"], "argument --rows: 0: numbers above 0 are wanted"),
        (["scheduler", "--only", "cores"], "--only cores is not known"),
        (["frontend", "--tokens", "0"], "--tokens 0: more than 0 is wanted"),
        (["sreve"], "sreve is no measurement; did you mean serve?"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_in_a_measurement_is_one_readable_line(words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *words]) == 2
    assert complaint in (error := capsys.readouterr().err)
    assert error.count("\n") == 1


def test_bench_lists_its_measurements(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown for name in ("serve", "limits", "kernels", "scheduler", "frontend"))
    assert main(["bench"]) == 2
