"""From wishes to parameters: what is in range passes, what is not is refused by name, defaults fill what is not said."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trivet_frontend.serving import GenerationOptions, SamplingDefaults, defaults_from
from trivet_frontend.serving.prompts import normalised_prompts
from trivet_frontend.serving.sampling import check_options, fitting_max_tokens, resolve_sampling
from trivet_proto.errors import ErrorKind, TrivetError

VOCAB_SIZE = 1000
CONTEXT = 100

RANGES = {
    "temperature": (0, 2),
    "min_p": (0, 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
}


def check(**fields: object) -> None:
    check_options(GenerationOptions(**fields), vocab_size=VOCAB_SIZE, max_logprobs=20)


@given(field=st.sampled_from(sorted(RANGES)), value=st.floats())
def test_a_number_passes_exactly_when_it_is_in_range(field: str, value: float) -> None:
    least, most = RANGES[field]
    if math.isfinite(value) and least <= value <= most:
        check(**{field: value})
        return
    with pytest.raises(TrivetError) as caught:
        check(**{field: value})
    assert (caught.value.kind, caught.value.param) == (ErrorKind.INVALID_ARGUMENT, field)


@given(key=st.text(max_size=8), bias=st.floats())
def test_logit_bias_takes_ids_of_the_vocabulary_alone(key: str, bias: float) -> None:
    good = key.isascii() and key.isdigit() and int(key) < VOCAB_SIZE and math.isfinite(bias) and abs(bias) <= 100
    if good:
        check(logit_bias={key: bias})
        return
    with pytest.raises(TrivetError) as caught:
        check(logit_bias={key: bias})
    assert caught.value.param == "logit_bias"


@given(prompt=st.integers(1, 200), wish=st.none() | st.integers(0, 200))
def test_prompt_and_answer_never_exceed_the_context(prompt: int, wish: int | None) -> None:
    options = GenerationOptions(max_tokens=wish)
    if prompt + (1 if wish is None else wish) > CONTEXT:
        with pytest.raises(TrivetError, match=str(CONTEXT)) as caught:
            fitting_max_tokens(options, defaults=SamplingDefaults(), prompt_tokens=prompt, max_model_len=CONTEXT)
        assert str(prompt) in caught.value.message
        return
    granted = fitting_max_tokens(options, defaults=SamplingDefaults(), prompt_tokens=prompt, max_model_len=CONTEXT)
    assert prompt + granted <= CONTEXT
    assert granted == (CONTEXT - prompt if wish is None else wish)


def resolved(defaults: SamplingDefaults, **fields: object):
    return resolve_sampling(
        GenerationOptions(**fields),
        defaults=defaults,
        prompt_tokens=10,
        max_model_len=CONTEXT,
        vocab_size=VOCAB_SIZE,
        bad_words=(),
        prompt_logprobs=None,
    )


def test_the_models_defaults_hold_where_nothing_is_said() -> None:
    config = {"temperature": 0.2, "top_p": 0.9, "top_k": 50, "repetition_penalty": 1.1, "max_new_tokens": 30}
    defaults = defaults_from(config)
    sampling = resolved(defaults)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.repetition_penalty) == (0.2, 0.9, 50, 1.1)
    assert sampling.max_tokens == 30
    said = resolved(defaults, temperature=0.0, top_p=1.0, top_k=0, repetition_penalty=1.0, max_tokens=5)
    assert (said.temperature, said.top_p, said.top_k, said.repetition_penalty, said.max_tokens) == (0.0, 1.0, 0, 1.0, 5)


def test_useless_entries_of_a_generation_config_are_warned_of_and_count_as_absent(caplog: pytest.LogCaptureFixture) -> None:
    config = {"temperature": "hot", "top_p": 0, "top_k": True, "repetition_penalty": -1, "max_new_tokens": None}
    assert defaults_from(config) == SamplingDefaults()
    assert [record.getMessage().split()[3] for record in caplog.records] == ["temperature", "top_p", "top_k", "repetition_penalty"]
    assert "generation_config.json: temperature is 'hot', expected a number from 0 to 2; it counts as absent" in caplog.text


def test_seeds_are_read_modulo_two_to_the_64() -> None:
    for seed, expected in ((0, 0), (42, 42), (-1, 2**64 - 1), (2**64 - 1, 2**64 - 1)):
        check(seed=seed)
        assert resolved(SamplingDefaults(), seed=seed).seed == expected
    drawn = {resolved(SamplingDefaults()).seed for _ in range(8)}
    assert len(drawn) == 8


def test_all_tokens_is_zero_or_minus_one_and_more_than_the_vocabulary_is_all_of_it() -> None:
    assert [resolved(SamplingDefaults(), top_k=k).top_k for k in (0, -1, 5, 5000)] == [0, 0, 5, VOCAB_SIZE]


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-5, 1005) | st.floats(allow_nan=False) | st.text(max_size=3),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
        max_leaves=8,
    )
)
def test_any_prompt_is_normalised_or_refused_by_name(prompt: object) -> None:
    refusal: TrivetError | None = None
    prompts: list[str | list[int]] = []
    try:
        prompts = normalised_prompts(prompt, vocab_size=VOCAB_SIZE)
    except TrivetError as error:
        refusal = error
    if refusal is not None:
        assert (refusal.kind, refusal.param) == (ErrorKind.INVALID_ARGUMENT, "prompt")
        return
    assert prompts
    for one in prompts:
        assert len(one) > 0
        if isinstance(one, list):
            assert all(type(token) is int and 0 <= token < VOCAB_SIZE for token in one)
