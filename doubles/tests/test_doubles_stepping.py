"""One step at a time, without a scheduler: a block that does not hold what a request needs shows in its token."""

import pytest
from trivet_doubles.kv_layers import kv_layers
from trivet_doubles.mock_worker.stepping import MockRunner
from trivet_doubles.model import DoubleModel
from trivet_doubles.tokens import expected_output
from trivet_proto.errors import ErrorKind, TrivetError
from trivet_proto.packing import pack_i32, pack_u32, unpack_i32, unpack_u32
from trivet_proto.v1 import types_pb2, worker_pb2

BLOCK = 4
PROMPT = list(range(10, 19))  # nine tokens: two full blocks and one more


def runner_of(model: DoubleModel, kinds: str = "full_attention") -> MockRunner:
    groups = [types_pb2.KvCacheGroup(layers=[layer.layer], spec=layer.spec) for layer in kv_layers(kinds, BLOCK)]
    config = types_pb2.KvCacheConfig(num_blocks=32, groups=groups)
    return MockRunner(config, model.law(), max_num_seqs=8, max_model_len=64)


def new(
    handle: int, blocks: list[int], *, computed: int = 0, count: int = len(PROMPT), ids: list[int] = PROMPT, groups: int = 1
) -> worker_pb2.NewRequest:
    return worker_pb2.NewRequest(
        handle=handle,
        token_ids=pack_i32(ids),
        num_prompt_tokens=len(ids),
        sampling=types_pb2.SamplingParams(max_tokens=20),
        seed=3,
        block_ids=pack_i32(blocks),
        block_counts=pack_i32([len(blocks) // groups] * groups),
        num_computed_tokens=computed,
        num_scheduled_tokens=count,
    )


def step_of(number: int, *requests: worker_pb2.NewRequest, **fields: bytes | int) -> worker_pb2.Step:
    return worker_pb2.Step(step=number, new_requests=requests, **fields)  # type: ignore[arg-type]


def known(handle: int, computed: int, blocks: tuple[int, ...] = (), *, count: int = 1) -> worker_pb2.KnownRequests:
    return worker_pb2.KnownRequests(
        handles=pack_u32([handle]),
        num_scheduled_tokens=pack_i32([count]),
        num_computed_tokens=pack_i32([computed]),
        new_block_ids=pack_i32(blocks),
        new_block_counts=pack_i32([len(blocks)]),
    )


def run(runner: MockRunner, step: worker_pb2.Step) -> worker_pb2.StepResult:
    return runner.run(step, runner.update(step))


def tokens_of(result: worker_pb2.StepResult) -> list[int]:
    return unpack_i32(result.token_ids).tolist()


def test_steps_in_pieces_give_the_law(model: DoubleModel) -> None:
    runner, wanted = runner_of(model), expected_output(PROMPT, 3, 3, model.law().choices)
    assert tokens_of(run(runner, step_of(1, new(1, [5, 9, 2], count=6)))) == []
    assert tokens_of(run(runner, worker_pb2.Step(step=2, known=known(1, 6, count=3)))) == wanted[:1]
    assert tokens_of(run(runner, worker_pb2.Step(step=3, known=known(1, 9)))) == wanted[1:2]
    result = run(runner, step_of(4, new(2, [5, 9, 4], computed=8, count=1)))  # a prefix hit
    assert tokens_of(result) == wanted[:1]
    assert unpack_u32(result.handles).tolist() == [2]
    assert runner.wrong_slots == 0


@pytest.mark.parametrize(
    ("blocks", "why"),
    [([9, 5, 4], "swapped"), ([5, 7, 4], "never written"), ([0, 9, 4], "the null block")],
)
def test_a_prefix_hit_on_wrong_blocks_gives_another_token(model: DoubleModel, blocks: list[int], why: str) -> None:
    runner = runner_of(model)
    (right,) = tokens_of(run(runner, step_of(1, new(1, [5, 9, 2]))))
    (wrong,) = tokens_of(run(runner, step_of(2, new(2, blocks, computed=8, count=1))))
    assert wrong != right, why
    assert runner.wrong_slots > 0


def test_a_block_given_to_two_spoils_the_first(model: DoubleModel) -> None:
    runner, wanted = runner_of(model), expected_output(PROMPT, 3, 2, model.law().choices)
    assert tokens_of(run(runner, step_of(1, new(1, [5, 9, 2])))) == wanted[:1]
    run(runner, step_of(2, new(2, [6, 9, 3], count=5, ids=list(range(30, 40)))))  # writes one slot of block 9
    assert tokens_of(run(runner, worker_pb2.Step(step=3, known=known(1, 9)))) != wanted[1:]
    assert runner.wrong_slots == 1


def test_what_was_computed_over_a_wrong_block_is_wrong_too(model: DoubleModel) -> None:
    runner = runner_of(model)
    run(runner, step_of(1, new(1, [5, 9, 2], computed=4, count=4)))  # block 5 was never written
    run(runner, step_of(2, new(2, [5, 8, 3], count=4)))  # now it is
    run(runner, step_of(3, new(3, [5, 9, 4], computed=8, count=1)))
    assert runner.wrong_slots == 4 + 4


def test_zeroed_blocks_are_empty_and_copied_ones_are_the_same(model: DoubleModel) -> None:
    runner, wanted = runner_of(model), expected_output(PROMPT, 3, 1, model.law().choices)
    run(runner, step_of(1, new(1, [5, 9, 2])))
    copied = step_of(2, new(2, [5, 7, 4], computed=8, count=1), copy_sources=pack_i32([9]), copy_targets=pack_i32([7]))
    assert tokens_of(run(runner, copied)) == wanted
    zeroed = step_of(3, new(3, [5, 7, 6], computed=8, count=1), blocks_to_zero=pack_i32([7]))
    assert tokens_of(run(runner, zeroed)) != wanted


def test_a_failed_step_scribbles_and_those_behind_it_are_skipped(model: DoubleModel) -> None:
    runner = runner_of(model)
    failing = step_of(1, new(1, [5, 9, 2]))
    runner.fail(failing, runner.update(failing))
    behind = step_of(2, new(2, [5, 9, 4], computed=8, count=1))
    runner.update(behind)
    assert runner.skips(behind)
    again = worker_pb2.Step(step=3, known=known(2, 8), resync=1)
    rows = runner.update(again)
    assert not runner.skips(again)
    runner.run(again, rows)
    assert runner.wrong_slots == 8, "what the failed step was to write does not count"


def test_steps_that_make_no_sense_are_refused(model: DoubleModel) -> None:
    runner = runner_of(model)
    for step, words in [
        (step_of(1, new(1, [5, 9, 2], count=10)), "up to token 10, which does not exist"),
        (step_of(2, new(2, [5, 9])), "9 tokens has 2 blocks of 4"),
        (step_of(3, new(3, [5, 9, 99])), "not in the pool of 32"),
        (worker_pb2.Step(step=4, known=known(77, 0)), "request 77, which this worker does not hold"),
        (step_of(5, new(1, [5, 9, 2])), "known already"),
    ]:
        with pytest.raises(TrivetError, match=words) as refused:
            run(runner, step)
        assert refused.value.kind is ErrorKind.ABORTED


def test_a_sliding_window_looks_back_no_further(model: DoubleModel) -> None:
    runner = runner_of(model, "full_attention,sliding_window:4")
    wanted = expected_output(PROMPT, 3, 2, model.law().choices)
    # The window of the last token begins at position 5: its group's first block may be gone.
    run(runner, step_of(1, new(1, [5, 9, 2, 11, 12, 13], count=8, groups=2)))
    request = new(2, [5, 9, 2, 0, 12, 14], computed=8, count=1, groups=2)
    assert tokens_of(run(runner, step_of(2, request))) == wanted[:1]
    assert runner.wrong_slots == 0
    run(runner, step_of(3, new(3, [5, 9, 2, 0, 0, 15], computed=8, count=1, groups=2)))
    assert runner.wrong_slots == 3


def test_other_kinds_of_layers_are_taken_and_their_tables_kept(model: DoubleModel) -> None:
    runner = runner_of(model, "full_attention,mamba")
    wanted = expected_output(PROMPT, 3, 1, model.law().choices)
    assert tokens_of(run(runner, step_of(1, new(1, [5, 9, 2, 1, 1, 1], groups=2)))) == wanted


def test_a_layer_that_nobody_knows_is_refused_with_those_that_are() -> None:
    with pytest.raises(TrivetError, match="'attention' is no layer; known are full_attention, sliding_window"):
        kv_layers("attention", BLOCK)
    with pytest.raises(TrivetError, match="it is no JSON list"):
        kv_layers('[{"layer": "a"}]', BLOCK)
    (layer,) = kv_layers('[{"layer": "a", "spec": {"blockSize": 8, "pageSizeBytes": "64", "slidingWindow": {"window": 5}}}]', BLOCK)
    assert layer.spec.sliding_window.window == 5
