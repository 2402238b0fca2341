"""What the worker's page says of its steps."""

from trivet_proto.packing import pack_i32
from trivet_proto.v1 import worker_pb2
from trivet_worker.metrics import WorkerMetrics

GREEDY = {"temperature": 0.0}


def test_steps_are_counted_by_status_and_timed_by_phase(driver, monkeypatch) -> None:
    metrics = WorkerMetrics()
    value = metrics.registry.get_sample_value
    request = driver.request([1, 2, 3], **GREEDY)
    metrics.observe(driver.step([request]))
    with monkeypatch.context() as patch:
        patch.setattr("trivet_worker.runner.runner.put_sampled", lambda *_: (_ for _ in ()).throw(MemoryError))
        metrics.observe(driver.runner.execute(driver.message(known=[(request.handle, 3, 1)])))
    metrics.observe(driver.runner.execute(driver.message(known=[(request.handle, 3, 1)])))
    assert [value("trivet_worker_steps_total", {"status": status}) for status in ("done", "failed", "skipped")] == [1, 1, 1]
    assert value("trivet_worker_tokens_total") == 3
    for phase in ("link", "input", "forward", "sample"):
        assert value("trivet_worker_step_seconds_count", {"phase": phase}) == 1
    assert (value("trivet_worker_step_seconds_sum", {"phase": "forward"}) or 0) > 0


def test_rows_that_were_not_finite_are_counted_and_masked_ones_are_not(driver) -> None:
    metrics = WorkerMetrics()
    bad, empty = driver.request([1, 2, 3], **GREEDY), driver.request([4, 5], allowed_token_ids=pack_i32([10**6]), **GREEDY)
    for cache in driver.runner._caches.values():
        cache[1] = float("nan")
    bad.num_computed_tokens, bad.num_scheduled_tokens = 2, 1  # reads what is poisoned
    result = driver.step([bad, empty])
    assert set(result.flags) == {worker_pb2.ROW_FLAG_NON_FINITE, worker_pb2.ROW_FLAG_ALL_MASKED}
    metrics.observe(result)
    assert metrics.registry.get_sample_value("trivet_worker_non_finite_rows_total") == 1
