"""Conversations: every accepted form becomes one plain form, every other is refused by its place."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trivet_frontend.chat import normalised_messages, render
from trivet_frontend.chat.messages import ROLES
from trivet_proto.errors import ErrorKind, TrivetError

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["type", "text", "function", "name", "x"]), inner),
    max_leaves=10,
)


def test_content_without_text_is_empty_text() -> None:
    forms: list[dict[str, object]] = [{"content": None}, {}, {"content": []}, {"content": ""}]
    assert [normalised_messages([{"role": "assistant"} | form])[0]["content"] for form in forms] == [""] * 4


def test_text_parts_are_joined_in_order() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "refusal", "refusal": "two"}]
    assert normalised_messages([{"role": "user", "content": parts}])[0]["content"] == "one\ntwo"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [('{"a": 1}', {"a": 1}), ({"a": 1}, {"a": 1}), ('{"a": "cut', {}), ('{"a": "x"y"}', {}), ("[1]", {}), ("", {}), (None, {})],
)
def test_broken_arguments_of_the_history_become_empty(arguments: object, expected: object) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    [message] = normalised_messages([{"role": "assistant", "content": None, "tool_calls": [call]}])
    assert message["tool_calls"][0]["function"]["arguments"] == expected


@given(
    message=st.fixed_dictionaries(
        {}, optional={"role": st.sampled_from([*sorted(ROLES), "wizard"]) | JSON, "content": JSON, "tool_calls": JSON, "name": JSON}
    )
    | JSON
)
def test_any_message_is_normalised_or_refused_by_its_place(message: object) -> None:
    refusal: TrivetError | None = None
    try:
        [plain] = normalised_messages([message])
    except TrivetError as error:
        refusal = error
    if refusal is None:
        assert isinstance(plain["content"], str)
        assert plain["role"] in ROLES
    else:
        assert refusal.kind is ErrorKind.INVALID_ARGUMENT
        assert (refusal.param or "").startswith("messages[0]")


def test_templates_have_what_hugging_face_templates_use() -> None:
    body = "{% if loop.index > 2 %}{% break %}{% endif %}{% generation %}{{ m | tojson }}{% endgeneration %}"
    source = "{% for m in messages %}" + body + "{% endfor %}"
    assert render(source, {"messages": [{"a": "é<"}, 2, 3]}) == '{"a": "é<"}2'
    assert render("{{ strftime_now('%Y') }}", {}).isdigit()


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no') }}",
        "{{ 1 + 'a' }}",
        "{{ x.y.z }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ 1 // 0 }}",
        "{% if %}",
        "{{ {}['a'] + 1 }}",
    ],
)
def test_what_a_template_trips_over_is_the_callers_error(source: str) -> None:
    with pytest.raises(TrivetError) as caught:
        render(source, {"messages": []})
    assert caught.value.kind is ErrorKind.INVALID_ARGUMENT


def test_a_template_may_not_change_or_reach_what_it_is_given() -> None:
    with pytest.raises(TrivetError):
        render("{{ messages.append(1) }}", {"messages": []})
