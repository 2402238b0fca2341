"""The keywords of `LLM`: which there are, what they become, and how a wrong one is refused before anything starts."""

import inspect
from pathlib import Path

import msgspec
import numpy as np
import pytest
from trivet.launch.ownership import FRONTEND, LAUNCHER_OWN, OWNERS
from trivet.launch.settings import ServeSettings
from trivet.offline.settings import frontend_settings, load_offline_settings, plan_in_process

from trivet import LLM, TrivetError

OF_SERVERS = {"served_model_name", "chat_template", "handover_timeout", "drain_timeout", "log_format", "step_timeout", "replica_timeout"}
"""What matters to who serves others, and not to who waits for answers in the same program."""

ADDRESSES = {name for name, owners in OWNERS.items() if owners == (FRONTEND,)} - {"generation_config"}


def test_what_shapes_the_engine_is_a_keyword() -> None:
    keywords = set(inspect.signature(LLM).parameters) - {"inprocess", "config", "progress", "own_settings"}
    settings = {field.name for field in msgspec.structs.fields(ServeSettings)}
    assert keywords <= settings
    assert settings - keywords == (OF_SERVERS | ADDRESSES | LAUNCHER_OWN) - {"workers", "startup_timeout"}


def test_keywords_reach_their_services() -> None:
    settings = load_offline_settings(
        {"model": Path("/a/model"), "dtype": "float32", "max_num_seqs": 5, "enable_prefix_caching": False, "generation_config": "neutral"},
        {},
    )
    plan = plan_in_process(settings, {})
    assert (plan.worker.model, plan.worker.dtype, plan.worker.max_num_seqs) == ("/a/model", "float32", 5)
    assert plan.scheduler.enable_prefix_caching is False
    assert frontend_settings(settings, {}, plan.address).generation_config == "neutral"


def test_what_no_keyword_says_comes_from_variables_and_file(tmp_path: Path) -> None:
    file = tmp_path / "trivet.toml"
    file.write_text("[worker]\nblock_size = 32\n[scheduler]\nwatermark = 0.1\n")
    environ = {"TRIVET_WORKER_SPIN": "7", "TRIVET_SERVE_DTYPE": "bfloat16"}
    plan = plan_in_process(load_offline_settings({"config": file}, environ), environ)
    assert (plan.worker.block_size, plan.worker.spin, plan.worker.dtype) == (32, 7, "bfloat16")
    assert plan.scheduler.watermark == 0.1


def test_settings_of_worker_and_scheduler_alone_are_keywords_too() -> None:
    settings = load_offline_settings({}, {}, {"model_form": "native", "memory_utilization": 0.5, "run_ahead": 4, "watermark": None})
    environ = {"TRIVET_WORKER_MODEL_FORM": "layers", "TRIVET_SCHEDULER_WATERMARK": "0.2"}
    plan = plan_in_process(settings, environ)
    assert (plan.worker.model_form, plan.worker.memory_utilization) == ("native", 0.5)
    assert (plan.scheduler.run_ahead, plan.scheduler.watermark) == (4, 0.2)


@pytest.mark.parametrize(("value", "means"), [(True, "on"), (False, "off"), ("auto", "auto")])
def test_batch_invariant_is_a_truth_too(value: object, means: str) -> None:
    assert plan_in_process(load_offline_settings({"batch_invariant": value}, {}), {}).worker.batch_invariant == means


def test_values_need_not_be_of_the_plainest_type() -> None:
    settings = load_offline_settings({"max_num_seqs": np.int64(3), "kv_cache_memory": 2**20, "logits_processors": ("a:B", "c:D")}, {})
    worker = plan_in_process(settings, {}).worker
    assert (worker.max_num_seqs, worker.kv_cache_memory, worker.logits_processors) == (3, 2**20, ("a:B", "c:D"))


@pytest.mark.parametrize("name", ["--port", "-x", "--config=/etc/passwd", "--"])
def test_a_model_is_a_path_whatever_it_begins_with(name: str) -> None:
    assert plan_in_process(load_offline_settings({"model": name}, {}), {}).worker.model == f"./{name}"
    environ = {"TRIVET_SERVE_MODEL": name}
    assert plan_in_process(load_offline_settings({}, environ), environ).worker.model == f"./{name}"


def test_a_debugger_may_hold_a_step_of_one_process() -> None:
    assert plan_in_process(load_offline_settings({}, {}), {}).scheduler.step_timeout >= 3600


@pytest.mark.parametrize("inprocess", [False, True])
@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"dtype": "float31"}, "^dtype: 'float31' is not one of auto, float32, bfloat16$"),
        ({"quantization": "q3"}, "^quantization: 'q3' is not one of none, "),
        ({"max_num_seqs": 0}, "^max_num_seqs: 0 is below 1$"),
        ({"kv_cache_memory": "much"}, "^kv_cache_memory: 'much' is not a size such as 512MiB or 2GiB"),
        ({"batch_invariant": "maybe"}, "^batch_invariant: 'maybe' is not one of auto, on, off$"),
        ({"batch_invariant": 1}, "^batch_invariant: '1' is not one of auto, on, off$"),
        ({"dtype": True}, "^dtype: 'True' is not one of auto, float32, bfloat16$"),
        ({"max_num_seqs": True}, "^max_num_seqs: True is not a whole number$"),
        ({"max_num_seqs": [1]}, r"^max_num_seqs: \[1\] is not a whole number$"),
        ({"enable_prefix_caching": "maybe"}, "^enable_prefix_caching: 'maybe' is not true or false$"),
        ({"log_level": True}, "^log_level: True is not one of debug, info, warning, error$"),
        ({"startup_timeout": "soon"}, "^startup_timeout: 'soon' is not a number$"),
        ({"logits_processors": [1]}, r"^logits_processors: \[1\] is not a list of texts"),
        ({"generation_config": "x"}, "^generation_config: 'x' is not one of auto, neutral$"),
        ({"model_form": "naive"}, "^model_form: 'naive' is not one of auto, native, layers$"),
        ({"run_ahead": True}, "^run_ahead: 'True' is not a whole number$"),
        ({"run_ahead": 0}, "^run_ahead: 0 is below 1$"),
        (
            {"run_ahaed": 4},
            "^run_ahaed is no keyword of LLM; did you mean run_ahead[?]; what is none is set by TRIVET_WORKER_<NAME> or TRIV",
        ),
        ({"step_timeout": 4}, "^step_timeout is no keyword of LLM but a setting of the scheduler: .* TRIVET_SCHEDULER_STEP_TIMEOUT, or st"),
        ({"port": 80}, "^port is no keyword of LLM"),
        ({"config": "/no/such.toml"}, "^the configuration file /no/such.toml cannot be read"),
    ],
)
def test_a_wrong_keyword_is_refused_by_its_name_with_what_is_right(inprocess: bool, keywords: dict[str, object], words: str) -> None:
    with pytest.raises(TrivetError, match=words):
        LLM(inprocess=inprocess, **keywords)  # type: ignore[arg-type]


def test_a_chat_template_that_is_none_is_refused_before_a_model_is_loaded(tmp_path: Path) -> None:
    template, file = tmp_path / "bad.jinja", tmp_path / "trivet.toml"
    template.write_text("{% if x")
    file.write_text(f'[frontend]\nchat_template = "{template}"\n')
    with pytest.raises(TrivetError, match=f"^the chat template {template} is no template"):
        LLM(config=file)


def test_one_process_has_one_worker() -> None:
    with pytest.raises(TrivetError, match="workers: one process has one worker, not 2; leave inprocess out for more"):
        LLM(inprocess=True, workers=2)
