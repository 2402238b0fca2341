"""Templates: what they expect of messages, what they may not do, and the same words as Hugging Face's renderer."""

import logging
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast
from trivet_checkpoint import bundle_of, open_checkpoint, resolve_model
from trivet_frontend.chat import (
    ArgumentsForm,
    cut_at_continuation_mark,
    normalised_messages,
    render,
    template_traits,
    with_continuation_mark,
)
from trivet_proto.errors import ErrorKind, TrivetError

_FILES = bundle_of(open_checkpoint(resolve_model(None))).files
TEMPLATE = _FILES["chat_template.jinja"].decode()
TOKENIZER = Tokenizer.from_str(_FILES["tokenizer.json"].decode())
REFERENCE = PreTrainedTokenizerFast(tokenizer_object=TOKENIZER, bos_token="<|im_start|>", eos_token="<|im_end|>", chat_template=TEMPLATE)

MESSAGES = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["system", "user", "assistant", "tool"]),
            "content": st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
            | st.sampled_from(["<|im_end|>", "{{ x }}", "  a \n"]),
        }
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=200, deadline=None)
@given(messages=MESSAGES, prompted=st.booleans(), in_parts=st.booleans())
def test_rendering_equals_the_reference(messages: list[dict[str, Any]], prompted: bool, in_parts: bool) -> None:
    given_messages: list[dict[str, Any]] = messages
    if in_parts:
        given_messages = [one | {"content": [{"type": "text", "text": one["content"]}]} for one in messages]
    expected = REFERENCE.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompted)
    variables = {"add_generation_prompt": prompted, "bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    assert render(TEMPLATE, {"messages": normalised_messages(given_messages, template_traits(TEMPLATE)), **variables}) == expected


@settings(max_examples=200, deadline=None)
@given(messages=MESSAGES)
def test_a_continued_message_equals_the_reference(messages: list[dict[str, Any]]) -> None:
    if not messages[-1]["content"].strip():
        return
    expected = REFERENCE.apply_chat_template(messages, tokenize=False, continue_final_message=True)
    plain = normalised_messages(messages, template_traits(TEMPLATE))
    variables = {"messages": with_continuation_mark(plain), "add_generation_prompt": False, "bos_token": "<|im_start|>"}
    assert cut_at_continuation_mark(render(TEMPLATE, variables)) == expected


PARTS_ONLY = "{% for m in messages %}{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endfor %}"
NAMED = "{% for m in messages %}{% set c = m['content'] %}{% for part in c %}[{{ part.text }}]{% endfor %}{% endfor %}"
MACRO = "{% macro show(c) %}{% for part in c %}[{{ part['text'] }}]{% endfor %}{% endmacro %}"
MACRO += "{% for m in messages %}{{ show(m.content) }}{% endfor %}"
BOTH = "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
BOTH += "{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endif %}{% endfor %}"
PLAIN = "{% for m in messages %}{{ m.content }}{% for word in m.content.split('x') %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("source", "text", "parts"),
    [(PARTS_ONLY, "[a]", "[a][b]"), (NAMED, "[a]", "[a][b]"), (MACRO, "[a]", "[a][b]"), (BOTH, "a", "[a][b]"), (PLAIN, "a", "a\nb")],
)
def test_a_template_gets_content_in_the_form_it_reads(source: str, text: str, parts: str) -> None:
    traits = template_traits(source)
    listed = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render(source, {"messages": normalised_messages([{"role": "user", "content": "a"}], traits)}) == text
    assert render(source, {"messages": normalised_messages([{"role": "user", "content": listed}], traits)}) == parts


LOOP = "{% for m in messages %}{% for call in m.tool_calls %}BODY{% endfor %}{% endfor %}"
WRITES = LOOP.replace("BODY", "{{ '<' + call.function.arguments + '>' }}")
ITERATES = LOOP.replace("BODY", "<{% for k, v in call.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}>")
ASKS = LOOP.replace("BODY", "{% set a = call.function.arguments %}<{% if a is string %}{{ a }}{% else %}{{ a | tojson }}{% endif %}>")


@pytest.mark.parametrize(
    ("source", "form", "given_text", "expected"),
    [
        (WRITES, ArgumentsForm.TEXT, '{"a": 1}', '<{"a": 1}>'),
        (WRITES, ArgumentsForm.TEXT, '{"a": "cut', '<{"a": "cut>'),
        (WRITES, ArgumentsForm.TEXT, "", "<{}>"),
        (ITERATES, ArgumentsForm.MAPPING, '{"a": 1}', "<a=1>"),
        (ITERATES, ArgumentsForm.MAPPING, '{"a": "cut', "<>"),
        (ITERATES, ArgumentsForm.MAPPING, "[1]", "<>"),
        (ASKS, ArgumentsForm.EITHER, '{"a": 1}', '<{"a": 1}>'),
        (ASKS, ArgumentsForm.EITHER, '{"a": "cut', '<{"a": "cut>'),
        (TEMPLATE, ArgumentsForm.EITHER, '{"a": "cut', None),
    ],
)
def test_arguments_come_in_the_form_that_the_template_reads(
    source: str, form: ArgumentsForm, given_text: str, expected: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    assert template_traits(source).arguments is form
    calls = [{"function": {"name": "f", "arguments": given_text}}] * 2
    with caplog.at_level(logging.WARNING):
        messages = normalised_messages([{"role": "assistant", "content": None, "tool_calls": calls}], template_traits(source))
    rendered = render(source, {"messages": messages})
    assert expected is None or rendered == expected * 2
    assert len(caplog.records) == (1 if given_text in ('{"a": "cut', "[1]") else 0)


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 10**9 }}",
        "{{ [1] * 10**9 }}",
        "{{ 9 ** 99999 }}",
        "{{ range(10**9) | list }}",
        "{{ '%999999999d' % 1 }}",
        "{{ '{:999999999}'.format(1) }}",
        "{{ 'a'.ljust(10**9) }}",
        "{{ 'a' | center(10**9) }}",
        "{% for a in range(9999) %}{% for b in range(9999) %}aaaaaaaaaaaaaaaaaaaa{% endfor %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ raises() }}",
        "{{ strftime_now(3) }}",
        "{{ messages | tojson }}",
        "{% include 'x' %}",
        "{{ [1] | map('nosuch') | list }}",
    ],
)
def test_what_a_template_cannot_do_is_a_refusal_with_its_words(source: str) -> None:
    def raises() -> None:
        raise RuntimeError("its own words")

    with pytest.raises(TrivetError) as caught:
        render(source, {"messages": [object()], "raises": raises}, most_characters=100_000)
    assert caught.value.kind is ErrorKind.INVALID_ARGUMENT
    assert "raises" not in source or "its own words" in caught.value.message
