import jax
import numpy as np
import pytest
import two_learners

import jaxreplay as jr


@pytest.mark.slow
def test_processes_that_keep_the_ratio_each_keep_it_together(children):
    port, started = two_learners.free_port(), []
    for index in range(2):
        ours, theirs = children.Pipe(duplex=False)
        process = children.Process(target=two_learners.process, args=(index, port, theirs))
        process.start()
        theirs.close()
        started.append((process, ours))
    results = [connection.recv() for _, connection in started]
    for process, _ in started:
        process.join(60)
        assert process.exitcode == 0
    for index, found in enumerate(results):
        assert found["drawn"] == two_learners.UPDATES * two_learners.BATCH // 2
        assert max(map(abs, found["balances"])) <= 128
        assert found["seen"] == {index}  # of its own rows
    added, drawn = results[0]["all"].sum(axis=0)
    assert abs(two_learners.RATIO * added - drawn) <= 2 * 128
    np.testing.assert_array_equal(results[0]["all"], results[1]["all"])
    assert results[0]["mean"] == results[1]["mean"]  # one learner


def test_weights_of_parts_are_those_of_the_whole(monkeypatch):
    """Of equal parts from processes that hold different numbers of items, with other totals of priorities.

    The expected weighted value of a row is a sum over all items, so nothing is drawn: it is their mean.
    """
    rng = np.random.default_rng(0)
    priorities = [rng.exponential(size=n) * scale for n, scale in ((100, 1.0), (300, 7.0))]
    values = np.concatenate([rng.normal(k, size=len(p)) for k, p in enumerate(priorities)])
    rows = np.concatenate([p / p.sum() for p in priorities])  # of a part
    weights = jax.jit(lambda rows: jr.importance_weights(rows / 2, 400, 1.0, normalize=None))(rows)
    weights = np.asarray(weights, np.float64)
    np.testing.assert_allclose(np.sum(rows / 2 * weights * values), values.mean(), rtol=1e-5)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    found = jax.jit(two_learners.global_weights)(rows, np.array([100, 300]))
    np.testing.assert_allclose(found, weights / weights.max(), rtol=1e-5)
