"""Prompts in, whole answers out, over a scheduler of this process that has no model."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest
from trivet_chassis.in_process import InProcessServer
from trivet_frontend.config import FrontendSettings
from trivet_frontend.offline import Batch, OfflineFrontend, Prompt, RequestOutput, SamplingParams
from trivet_frontend.serving import Inference
from trivet_proto.errors import ErrorKind, TrivetError
from trivet_proto.packing import unpack_i32
from trivet_proto.v1 import engine_pb2_grpc, types_pb2

PROMPTS: list[Prompt] = [[100 + number] for number in range(12)]


@contextlib.asynccontextmanager
async def offline(scheduler: Any, **settings: Any) -> AsyncIterator[OfflineFrontend]:
    server = InProcessServer()
    engine_pb2_grpc.add_EngineServiceServicer_to_server(scheduler, server)
    try:
        async with OfflineFrontend(FrontendSettings(scheduler=("unix:/nowhere",), **settings), dial=server.dial) as frontend:
            await frontend.until_ready()
            yield frontend
    finally:
        await server.close()


@pytest.fixture
async def fake(new_scheduler: Callable[..., Any]) -> Any:
    return new_scheduler("in-process")


@pytest.fixture
async def inference(fake: Any) -> AsyncIterator[Inference]:
    async with offline(fake) as frontend:
        yield frontend.inference


async def answers(inference: Inference, prompts: list[Prompt], params: SamplingParams, *, at_once: int = 64) -> list[RequestOutput]:
    return await Batch(prompts, [params] * len(prompts)).run(inference, at_once=at_once)


async def test_half_a_surrogate_pair_ends_its_own_request_alone(inference: Inference) -> None:
    wishes: dict[str, Any] = {"stop": "\ud800", "bad_words": ["b", "a\ud800"], "cache_salt": "\ud800"}
    params = [SamplingParams(max_tokens=2), *(SamplingParams(max_tokens=2, **{name: value}) for name, value in wishes.items())]
    outputs = await Batch(["Good", *["Good"] * len(wishes), "a\ud800b"], [*params, params[0]]).run(inference, at_once=64)
    errors = [output.error for output in outputs]
    assert [error and (error.kind, error.param) for error in errors] == [
        None,
        *((ErrorKind.INVALID_ARGUMENT, name) for name in [*wishes, "prompt"]),
    ]
    assert len(outputs[0].outputs[0].token_ids) == 2


@pytest.mark.parametrize("at_once", [1, 3, 64])
async def test_answers_come_in_the_order_of_the_prompts(inference: Inference, at_once: int) -> None:
    params = [SamplingParams(max_tokens=1 + (5 * number) % 7) for number in range(len(PROMPTS))]
    batch = Batch(PROMPTS, params)
    outputs = await batch.run(inference, at_once=at_once)
    assert [list(output.prompt_token_ids) for output in outputs] == PROMPTS
    assert [len(output.outputs[0].token_ids) for output in outputs] == [each.max_tokens for each in params]
    assert batch.finished == len(PROMPTS)
    assert batch.prompt_tokens == len(PROMPTS)
    assert batch.output_tokens == sum(each.max_tokens or 0 for each in params)


async def test_no_more_are_with_the_scheduler_than_may_be_at_once(fake: Any, inference: Inference) -> None:
    seen: list[int] = []
    script = fake.script

    def counting(add: Any, index: int) -> list[int]:
        seen.append(len(fake.live))
        return list(script(add, index))

    fake.script = counting
    await answers(inference, PROMPTS, SamplingParams(max_tokens=3), at_once=2)
    assert len(seen) == len(PROMPTS)
    assert max(seen) <= 2


async def test_what_is_refused_for_being_full_is_asked_again(fake: Any) -> None:
    async with offline(fake, max_requests=2) as frontend:
        outputs = await answers(frontend.inference, PROMPTS, SamplingParams(max_tokens=2))
    assert all(output.error is None and len(output.outputs[0].token_ids) == 2 for output in outputs)


async def test_an_answer_has_all_its_choices_with_their_logprobs(fake: Any, inference: Inference) -> None:
    params = SamplingParams(n=3, max_tokens=4, logprobs=2, prompt_logprobs=1)
    [output] = await answers(inference, ["Once upon a time"], params)
    assert output.prompt == "Once upon a time"
    assert len(output.prompt_token_ids) == 4
    assert [choice.index for choice in output.outputs] == [0, 1, 2]
    assert len({choice.token_ids for choice in output.outputs}) == 3
    for choice in output.outputs:
        assert choice.finish_reason == "length"
        assert choice.logprobs is not None
        assert tuple(row.token_id for row in choice.logprobs) == choice.token_ids
        assert all(len(row.top) == 2 for row in choice.logprobs)
        assert "".join(row.token for row in choice.logprobs) == choice.text
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == 4


async def test_an_error_ends_its_own_request_alone(fake: Any, inference: Inference) -> None:
    fake.script = lambda add, index: _fail_on(fake, add, [1, 2, 3])
    prompts: list[Prompt] = [[5], "", [49152], [7, 7], [6]]
    outputs = await answers(inference, prompts, SamplingParams(max_tokens=2))
    assert [None if output.error is None else output.error.kind for output in outputs] == [
        None,
        ErrorKind.INVALID_ARGUMENT,
        ErrorKind.INVALID_ARGUMENT,
        ErrorKind.INTERNAL,
        None,
    ]
    assert outputs[0].outputs[0].token_ids == outputs[4].outputs[0].token_ids == (1, 2)


def _fail_on(fake: Any, add: Any, tokens: list[int]) -> list[int]:
    """The prompt [7, 7] fails in the worker."""
    if unpack_i32(add.prompt_token_ids).tolist() == [7, 7]:
        handle = next(handle for handle, child in fake.live.items() if child.add is add)
        fake._fail(handle, fake.failure, fake.live[handle].outbox)
        return []
    return tokens


async def test_parameters_out_of_range_are_refused_as_by_the_services(inference: Inference) -> None:
    [output] = await answers(inference, [[1]], SamplingParams(temperature=3.0))
    assert output.error is not None
    assert output.error.param == "temperature"
    assert "at most 2" in output.error.message
    [output] = await answers(inference, [[1]], SamplingParams(logit_bias={49152: 1.0}))
    assert output.error is not None
    assert "not in the vocabulary of 49152 tokens" in output.error.message


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", "hot"), ("max_tokens", 1.5), ("stop", [1]), ("stop_token_ids", "x"), ("logit_bias", {1.5: 2}), ("n", True)],
)
def test_a_parameter_of_another_type_is_refused_by_its_name(field: str, value: object) -> None:
    with pytest.raises(TrivetError, match=f"^{field}: Expected") as refusal:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    assert refusal.value.param == field


async def test_keys_of_logit_bias_are_numbers_or_their_text(fake: Any, inference: Inference) -> None:
    seen = []
    fake.script = lambda add, index: seen.append(unpack_i32(add.sampling.logit_bias_ids).tolist()) or [1]
    await answers(inference, [[1]], SamplingParams(max_tokens=1, logit_bias={7: 1.0}))
    await answers(inference, [[1]], SamplingParams(max_tokens=1, logit_bias={"7": 1.0}))
    assert seen == [[7], [7]]


@pytest.mark.parametrize("key", ["a", "", "1.5", "--1", " 5"])
def test_a_text_that_is_no_token_id_is_refused_as_a_key(key: str) -> None:
    with pytest.raises(TrivetError, match=f"^logit_bias: '{key}' is no token id, which is a whole number$"):
        SamplingParams(logit_bias={key: 1.0})


@pytest.mark.parametrize(
    ("prompts", "ids"),
    [
        ([5, 6], [[5, 6]]),
        ((5, 6), [[5, 6]]),
        (range(5, 7), [[5, 6]]),
        (np.array([5, 6]), [[5, 6]]),
        ([np.int64(5), 6], [[5, 6]]),
        (np.array([[5, 6], [7, 8]]), [[5, 6], [7, 8]]),
        ([np.array([5, 6], dtype=np.uint16), (7,), range(8, 9)], [[5, 6], [7], [8]]),
        (([number] for number in (5, 6)), [[5], [6]]),
        ((number for number in (5, 6)), [[5, 6]]),
    ],
)
async def test_whatever_lists_token_ids_is_prompts(inference: Inference, prompts: object, ids: list[list[int]]) -> None:
    outputs = await Batch(prompts, (SamplingParams(max_tokens=1) for _ in ids)).run(inference, at_once=8)
    assert [list(output.prompt_token_ids) for output in outputs] == ids
    assert [output.error for output in outputs] == [None] * len(ids)


@pytest.mark.parametrize("prompts", [None, 5, 1.5, True, b"One", {"prompt": "One"}, {"One"}, np.int64(5), object, SamplingParams()])
def test_what_is_no_prompts_is_refused(prompts: object) -> None:
    with pytest.raises(TrivetError, match=r"^prompts: .+ is neither a text, nor a list of token ids, nor a list of either$") as refusal:
        Batch(prompts)
    assert refusal.value.param == "prompts"


@pytest.mark.parametrize("prompt", [None, 5, True, b"One", {"prompt": "One"}, ["One", "Two"], [[1], [2]], [1, "x"], [1.5], iter([5])])
async def test_what_is_no_prompt_among_others_is_refused_by_its_place(inference: Inference, prompt: object) -> None:
    outputs = await Batch([[7], prompt], SamplingParams(max_tokens=1)).run(inference, at_once=8)
    assert outputs[0].error is None
    assert outputs[1].error is not None
    assert outputs[1].error.message.startswith("prompts[1]: ")
    assert outputs[1].error.message.endswith(" is neither a text nor a list of token ids")


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"max_tokens": 2}, r"^sampling_params: {'max_tokens': 2} is neither SamplingParams\(…\) nor a list of them$"),
        ("x", "^sampling_params: 'x' is neither SamplingParams"),
        (5, "^sampling_params: 5 is neither SamplingParams"),
        ([{"max_tokens": 2}, None], r"^sampling_params\[0\]: {'max_tokens': 2} is not SamplingParams"),
        ([SamplingParams(), None], r"^sampling_params\[1\]: None is not SamplingParams"),
        ([SamplingParams()], "^sampling_params: 1 for 2 prompts; give one for all, or one for each$"),
    ],
)
def test_what_are_no_parameters_is_refused(params: object, words: str) -> None:
    with pytest.raises(TrivetError, match=words) as refusal:
        Batch(["One", "Two"], params)
    assert refusal.value.param == "sampling_params"


async def test_a_model_that_does_not_generate_says_what_it_serves(fake: Any) -> None:
    card = fake.card()
    card.tasks[:] = [types_pb2.TASK_EMBED, types_pb2.TASK_SCORE]
    fake.card = lambda: card
    async with offline(fake) as frontend:
        [output] = await answers(frontend.inference, [[1]], SamplingParams())
    assert output.error is not None
    assert output.error.kind is ErrorKind.UNIMPLEMENTED
    assert output.error.message == "SmolLM2-135M-Instruct does not serve generate; it serves embed, score"


async def test_who_gives_up_leaves_nothing_with_the_scheduler(fake: Any, inference: Inference) -> None:
    fake.pause_after = 1
    running = asyncio.create_task(answers(inference, PROMPTS, SamplingParams(max_tokens=5), at_once=4))
    await fake.until(lambda: len(fake.live) == 4)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert inference.requests_inside == 0
    await fake.until(lambda: not fake.live)
