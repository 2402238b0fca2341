"""Steps: order, feed-back, failures, prompt logprobs, blocks."""

import pytest
import torch
from trivet_proto.errors import TrivetError
from trivet_proto.packing import pack_i32, unpack_f32, unpack_i32, unpack_u8, unpack_u32
from trivet_proto.v1 import types_pb2, worker_pb2

PROMPT = list(range(10, 33))
GREEDY = {"temperature": 0.0}


def tokens(result) -> list[int]:
    return unpack_i32(result.token_ids).tolist()


def test_the_next_step_runs_with_a_token_that_nobody_told_it(driver) -> None:
    wanted = driver.run(driver.request(PROMPT, **GREEDY), 6)
    request = driver.request(PROMPT, **GREEDY)
    steps = [driver.message([request])]
    steps += [driver.message(known=[(request.handle, len(PROMPT) + index, 1)]) for index in range(5)]
    assert [token for step in steps for token in tokens(driver.runner.execute(step))] == wanted


def test_a_prompt_in_chunks_samples_only_at_its_end(driver) -> None:
    wanted = driver.run(driver.request(PROMPT, **GREEDY), 1)
    request = driver.request(PROMPT, scheduled=10, **GREEDY)
    first = driver.step([request])
    assert unpack_u32(first.handles).tolist() == [request.handle]
    assert unpack_i32(first.token_counts).tolist() == [0]
    assert not first.token_ids
    assert tokens(driver.step(known=[(request.handle, 10, 13)])) == wanted


@pytest.mark.parametrize("params", [GREEDY, {"temperature": 0.8, "top_p": 0.9}, {"temperature": 0.9, "presence_penalty": 1.0}])
def test_a_preempted_request_goes_on_with_the_tokens_it_would_have_had(driver, params) -> None:
    wanted = driver.run(driver.request(PROMPT, seed=42, **params), 8)
    neighbours = [driver.request([index] * 5, seed=index, room=20) for index in range(3)]
    request = driver.request(PROMPT, seed=42, **params)
    got = tokens(driver.step([*neighbours, request]))[-1:]
    for index in range(3):
        got += tokens(driver.step(known=[(request.handle, len(PROMPT) + index, 1)]))
    again = driver.request(PROMPT + got, prompt=len(PROMPT), seed=42, room=36, **params)
    got += tokens(driver.step([again], finished=[request.handle]))
    for index in range(3):
        got += tokens(driver.step(known=[(again.handle, len(PROMPT) + 4 + index, 1)]))
    assert got == wanted


def test_after_a_failure_steps_are_skipped_until_one_resyncs_and_nothing_is_lost(driver) -> None:
    wanted = driver.run(driver.request(PROMPT, **GREEDY), 4)
    request = driver.request(PROMPT, **GREEDY)
    got = tokens(driver.step([request]))
    steps = [driver.message(known=[(request.handle, len(PROMPT) + index, 1)]) for index in range(2)]
    late = driver.request([1, 2, 3], **GREEDY)
    held = driver.message([late], [(request.handle, len(PROMPT) + 2, 1)])
    hook = driver.runner._model.layers[-1].register_forward_pre_hook(lambda *_: torch.empty(1 << 60))
    failed = driver.runner.execute(steps[0])
    hook.remove()
    assert failed.status == worker_pb2.STEP_STATUS_FAILED
    assert failed.error.kind == types_pb2.ERROR_KIND_OUT_OF_MEMORY
    assert failed.error.retryable
    assert not failed.token_ids
    for step in (steps[1], held):
        assert driver.runner.execute(step).status == worker_pb2.STEP_STATUS_SKIPPED
    # The skipped step's new request is known, its tokens have not run.
    resumed = driver.step(known=[(request.handle, len(PROMPT), 1), (late.handle, 0, 3)], resync=failed.step)
    got += tokens(resumed)[:1]
    for index in range(2):
        got += tokens(driver.step(known=[(request.handle, len(PROMPT) + 1 + index, 1)]))
    assert got == wanted


def test_a_failure_after_sampling_leaves_no_token_behind(driver, monkeypatch) -> None:
    wanted = driver.run(driver.request(PROMPT, **GREEDY), 3)
    request = driver.request(PROMPT, **GREEDY)
    got = tokens(driver.step([request]))
    with monkeypatch.context() as patch:
        patch.setattr("trivet_worker.runner.runner.put_sampled", lambda *_: (_ for _ in ()).throw(MemoryError))
        failed = driver.runner.execute(driver.message(known=[(request.handle, len(PROMPT), 1)]))
    assert failed.status == worker_pb2.STEP_STATUS_FAILED
    got += tokens(driver.step(known=[(request.handle, len(PROMPT), 1)], resync=failed.step))
    got += tokens(driver.step(known=[(request.handle, len(PROMPT) + 1, 1)]))
    assert got == wanted


def test_a_step_without_rows_is_done(driver) -> None:
    request = driver.request(PROMPT, **GREEDY)
    driver.step([request])
    assert driver.step(finished=[request.handle, 12345]).handles == b""
    assert driver.step(dummy=True).handles == b""


def test_slots_are_given_back_so_that_more_requests_come_than_there_are(driver) -> None:
    held: list[int] = []
    for _ in range(6):
        requests = [driver.request([4, 5], room=4, **GREEDY) for _ in range(2)]
        assert len(tokens(driver.step(requests, finished=held))) == 2
        held = [request.handle for request in requests]


def chunks_of(results) -> dict[int, tuple[list[int], list[float]]]:
    """By position: ids and values."""
    found = {}
    for result in results:
        for chunk in result.prompt_logprobs:
            counts, first = unpack_i32(chunk.logprobs.counts).tolist(), 0
            ids, values = unpack_i32(chunk.logprobs.token_ids).tolist(), unpack_f32(chunk.logprobs.values).tolist()
            for offset, count in enumerate(counts):
                assert chunk.first_position + offset not in found
                found[chunk.first_position + offset] = (ids[first : first + count], values[first : first + count])
                first += count
    return found


def test_prompt_logprobs_come_once_per_position_whole_or_in_chunks(driver) -> None:
    params = {"prompt_logprobs": 2, "max_tokens": 0}
    whole = chunks_of([driver.step([driver.request(PROMPT, **params)])])
    assert sorted(whole) == list(range(1, len(PROMPT)))
    assert [ids[0] for ids, _ in whole.values()] == PROMPT[1:]
    assert all(len(ids) == 3 and max(values) <= 0 for ids, values in whole.values())
    request = driver.request(PROMPT, scheduled=8, **params)
    results = [driver.step([request]), driver.step(known=[(request.handle, 8, 8)]), driver.step(known=[(request.handle, 16, 7)])]
    chunked = chunks_of(results)
    assert {position: ids for position, (ids, _) in chunked.items()} == {position: ids for position, (ids, _) in whole.items()}
    for position, (_, values) in chunked.items():
        assert values == pytest.approx(whole[position][1], abs=1e-4)
    assert not any(result.token_ids for result in results)  # max_tokens 0 samples nothing


def test_prompt_logprobs_already_reported_are_not_repeated(driver) -> None:
    found = chunks_of([driver.step([driver.request(PROMPT, prompt_logprobs=0, reported=15)])])
    assert sorted(found) == list(range(15, len(PROMPT)))


def test_a_request_whose_cache_is_poisoned_is_flagged_and_its_neighbour_goes_on(driver) -> None:
    wanted = driver.run(driver.request(PROMPT, **GREEDY), 3)
    good, bad = driver.request(PROMPT, **GREEDY), driver.request([1, 2, 3], logprobs=1, **GREEDY)
    got = tokens(driver.step([good, bad]))[:1]
    blocks = unpack_i32(bad.block_ids).tolist()
    for cache in driver.runner._caches.values():
        cache[blocks[0]] = float("nan")
    result = driver.step(known=[(bad.handle, 3, 1), (good.handle, len(PROMPT), 1)])
    assert unpack_u8(result.flags).tolist() == [worker_pb2.ROW_FLAG_NON_FINITE, 0]
    assert unpack_i32(result.token_counts).tolist() == [0, 1]
    assert not result.logprob_rows
    got += tokens(result)
    got += tokens(driver.step(known=[(good.handle, len(PROMPT) + 1, 1)], finished=[bad.handle], blocks_to_zero=pack_i32(blocks)))
    assert got == wanted
    assert all(bool((cache[blocks] == 0).all()) for cache in driver.runner._caches.values())


def test_copied_blocks_serve_a_prefix_hit_that_ends_inside_a_block(driver, tools) -> None:
    wanted = driver.run(driver.request(PROMPT, **GREEDY), 4)
    first = driver.request(PROMPT, **GREEDY)
    driver.step([first])
    second = driver.request(PROMPT, scheduled=len(PROMPT) - 10, **GREEDY)
    second.num_computed_tokens = 10  # two blocks and a half of the first one's
    sources, targets = unpack_i32(first.block_ids)[:3], unpack_i32(second.block_ids)[:3]
    got = tokens(driver.step([second], copy_sources=pack_i32(sources), copy_targets=pack_i32(targets)))
    for index in range(3):
        got += tokens(driver.step(known=[(second.handle, len(PROMPT) + index, 1)]))
    assert got == wanted


def test_blocks_that_come_later_are_appended(driver) -> None:
    wanted = driver.run(driver.request(PROMPT, **GREEDY), 4)
    request, spare = driver.request(PROMPT, room=24, **GREEDY), driver.request([0], room=8)
    got = tokens(driver.step([request]))
    for index in range(3):
        step = driver.message(known=[(request.handle, len(PROMPT) + index, 1)])
        if index == 1:  # position 24 is the first of a new block
            step.known.new_block_ids, step.known.new_block_counts = spare.block_ids, pack_i32([2])
        got += tokens(driver.runner.execute(step))
    assert got == wanted


def test_a_new_epoch_starts_empty(driver, tools) -> None:
    request = driver.request(PROMPT, **GREEDY)
    driver.step([request])
    driver.runner.configure(tools.cache_config(driver.loaded, 32))
    with pytest.raises(TrivetError, match="does not hold"):
        driver.runner.execute(driver.message(known=[(request.handle, 23, 1)]))


def test_a_cache_configuration_that_does_not_fit_is_refused(driver, tools) -> None:
    config = tools.cache_config(driver.loaded, 32)
    config.tensors[0].size_bytes -= 1
    with pytest.raises(Exception, match="does not fit this model"):
        driver.runner.configure(config)


def test_timing_and_batch_are_reported(driver) -> None:
    result = driver.step([driver.request(PROMPT, **GREEDY), driver.request([1, 2], room=4, **GREEDY)])
    assert result.timing.forward_us > 0
    assert result.timing.total_us >= result.timing.forward_us
    assert (result.stats.num_requests, result.stats.num_tokens) == (2, len(PROMPT) + 2)


@pytest.mark.parametrize("form", [{"attention_backend": "torch"}, {"model_form": "layers"}, {"model_form": "native", "block_size": 16}])
@pytest.mark.parametrize("context", [2, 15])
def test_a_context_shorter_than_the_first_step_of_a_start_is_served_to_its_end(tools, load, tmp_path, form, context) -> None:
    tools.write_llama(tmp_path, hidden_size=96, num_attention_heads=3, num_key_value_heads=1)
    driver = tools.StepDriver(load(tmp_path, max_model_len=context, max_num_batched_tokens=context, **form))
    assert len(driver.run(driver.request(PROMPT[: context - 1], room=context, **GREEDY), 1)) == 1


@pytest.mark.parametrize("block_size", [1, 3])
def test_steps_of_one_token_and_blocks_of_odd_sizes_are_served(tools, load, block_size) -> None:
    driver = tools.StepDriver(load(max_model_len=10, max_num_seqs=1, max_num_batched_tokens=1, block_size=block_size))
    request = driver.request(PROMPT[:2], scheduled=1, room=10, **GREEDY)
    assert not tokens(driver.step([request]))
    assert len(tokens(driver.step(known=[(request.handle, 1, 1)]))) == 1
