"""Eight threads of random operations lose, repeat and mix nothing."""

import pytest
import seeds
import storm
from helpers import rarely


def run(name, seconds, seed):
    threads = storm.Storm(name, seconds, seed)
    try:
        threads.run()
        threads.check()
    except BaseException as error:
        error.add_note(f"{name}, JAXREPLAY_SEED={seed}; {dict(threads.happened)}")
        raise
    return threads.happened


@pytest.mark.parametrize("name", [x if x in ("sequences", "sharded") else rarely(x) for x in storm.kinds()])
def test_threads_do_what_one_thread_does(name):
    happened = run(name, 1.0, seeds.SEED)
    assert happened["add"] > 20
    assert happened["sample"] > 20
    assert happened["operation 4"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", storm.kinds())
def test_long_storms_with_a_new_seed(name):
    happened = run(name, 60.0, seeds.fresh())
    assert happened["add"] > 1_000
    assert happened["sample"] > 1_000
    assert all(happened[f"operation {k}"] > 100 for k in range(1, 8))
    assert happened["timeouts"] > 10
