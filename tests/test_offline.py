"""`LLM` against the references and the served model, with its engine in child processes and in this one."""

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from tests.gateway import Gateway
from tests.references.greedy import read_references
from trivet import LLM, ErrorKind, RequestOutput, SamplingParams, TrivetError

SHORT = [reference for reference in read_references() if len(reference.prompt_ids) < 60][:6]
GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture(scope="module", params=["child processes", "in process"])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(dtype="float32", num_kv_blocks=600, inprocess=request.param == "in process") as model:
        yield model


def test_greedy_tokens_are_those_of_the_references(llm: LLM) -> None:
    outputs = llm.generate([list(each.prompt_ids) for each in SHORT], SamplingParams(temperature=0, max_tokens=64, ignore_eos=True))
    assert [output.outputs[0].token_ids for output in outputs] == [each.output_ids for each in SHORT]
    assert [output.prompt_token_ids for output in outputs] == [each.prompt_ids for each in SHORT]


async def test_seeded_answers_are_those_of_the_served_model(llm: LLM, gateway: Gateway) -> None:
    prompt = "The recipe begins with"
    served = await gateway.complete(prompt, temperature=0.9, top_p=0.95, seed=5, n=2, max_tokens=12, logprobs=2, stop=["\n\n"])
    params = SamplingParams(temperature=0.9, top_p=0.95, seed=5, n=2, max_tokens=12, logprobs=2, stop="\n\n")
    [output] = llm.generate(prompt, params)
    assert [choice.text for choice in output.outputs] == [choice["text"] for choice in served["choices"]]
    assert [choice.finish_reason for choice in output.outputs] == [choice["finish_reason"] for choice in served["choices"]]
    for ours, theirs in zip(output.outputs, served["choices"], strict=True):
        assert ours.logprobs is not None
        assert [row.logprob for row in ours.logprobs] == pytest.approx(theirs["logprobs"]["token_logprobs"], abs=1e-4)
    [again] = llm.generate([prompt], [params])
    assert again.outputs == output.outputs
    assert output.outputs[0].token_ids != output.outputs[1].token_ids


def test_prompts_of_both_kinds_are_answered_in_their_order(llm: LLM) -> None:
    prompts = ["One", "Two", list(SHORT[0].prompt_ids), "Four"]
    params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (9, 1, 4, 2)]
    outputs = llm.generate(prompts, params, concurrency=2)
    assert [output.prompt for output in outputs] == ["One", "Two", None, "Four"]
    assert [len(output.outputs[0].token_ids) for output in outputs] == [9, 1, 4, 2]
    assert llm.generate(list(SHORT[0].prompt_ids), params[2])[0].outputs == outputs[2].outputs
    assert llm.generate([]) == []


def test_a_stop_string_ends_the_text_before_it(llm: LLM) -> None:
    [whole] = llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=16))
    [cut] = llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=16, stop=["answer"]))
    assert cut.outputs[0].text == whole.outputs[0].text.split("answer")[0]
    assert (cut.outputs[0].finish_reason, cut.outputs[0].stop_reason) == ("stop", "answer")


def test_an_error_is_its_own_prompts_and_is_raised_where_all_have_one(llm: LLM) -> None:
    outputs = llm.generate(["Once", "", [10**6], "Once"], GREEDY)
    assert [output.error is None for output in outputs] == [True, False, False, True]
    assert outputs[0].outputs == outputs[3].outputs
    with pytest.raises(TrivetError, match="temperature must be at least 0 and at most 2, not 9") as refusal:
        llm.generate(["One", "Two"], SamplingParams(temperature=9))
    assert refusal.value.kind is ErrorKind.INVALID_ARGUMENT
    with pytest.raises(TrivetError, match="max_tokens is 9000 and the prompt has 1 tokens, but the model's context is 8192 tokens"):
        llm.generate("One", SamplingParams(max_tokens=9000))
    with pytest.raises(TrivetError, match="sampling_params: 1 for 2 prompts; give one for all, or one for each"):
        llm.generate(["One", "Two"], [GREEDY])


def test_an_interrupt_gives_up_what_runs_and_the_next_call_is_answered(llm: LLM) -> None:
    begun = threading.Event()

    class Telling(list[int]):
        """A prompt that says when it is read, by the engine's thread."""

        def __iter__(self) -> Iterator[int]:
            begun.set()
            return super().__iter__()

    def interrupt() -> None:
        begun.wait(30)
        os.kill(os.getpid(), signal.SIGINT)

    interrupting = threading.Thread(target=interrupt)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background of a shell it is ignored
    interrupting.start()
    with pytest.raises(KeyboardInterrupt):
        llm.generate([Telling(SHORT[0].prompt_ids)], SamplingParams(temperature=0, max_tokens=8000, ignore_eos=True))
    interrupting.join()
    signal.signal(signal.SIGINT, before)
    outputs: list[RequestOutput] = llm.generate(["One"], GREEDY)
    assert len(outputs[0].outputs[0].token_ids) == 8
