"""What `migrate` and a restore to other devices give; crossings have all options that a buffer may move with."""

import crossings
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_runs import assert_same
from helpers import check_happened, items, over_devices, rarely, rejects

import jaxreplay as jr

LEAST = {"items added": 50, "items drawn": 100, "updates of stored items": 40}
MOVES = [  # options, and a number that chooses sizes: to a smaller buffer, to a larger one, to fewer shards, to more
    ("prioritized count_updates migrate", 0),
    ("prioritized count_updates devices sharded migrate", 2),
    ("prioritized max_uses devices sharded", 4),
    ("sequence gaps prioritized migrate", 8),
    ("sequence windows hindsight prioritized devices sharded migrate", 1),
    ("sequence windows gaps hindsight prioritized devices sharded", 4),
]


@pytest.mark.parametrize(("options", "number"), MOVES)
def test_a_moved_buffer_does_what_its_twin_does(tmp_path, options, number):
    on = crossings.Configuration((frozenset(options.split()),), frozenset())
    happened = crossings.Run(on, f"migration {options} {number}").run(tmp_path)
    check_happened(happened, LEAST)


@pytest.mark.parametrize("num_shards", [0, rarely(4)])
def test_counts_of_several_shards_are_added(num_shards):
    """Late updates, and TD errors that are not finite; a total saturates."""
    whole = jr.ReplayBuffer(capacity=8, sampler=jr.Prioritized(), count_updates=True)
    old, new = (over_devices(whole, n) for n in (2, num_shards))
    state = old.init(items(np.zeros(8)))
    for counts, total in (([1, 4], 5), ([2**31 - 2, 3], 2**31 - 1)):
        counts = jnp.array(counts, jnp.int32)
        sampler, uses = state.sampler.replace(rejected=counts), state.uses.replace(late=counts)
        found = jr.migrate(old, state.replace(sampler=sampler, uses=uses), new)
        for added in (found.sampler.rejected, found.uses.late):
            assert np.ravel(added).tolist() == [total, 0, 0, 0][: max(num_shards, 1)]


def test_spent_items_stay_spent_and_priorities_are_clipped_for_the_new_capacity():
    """To 2**63 / capacity after alpha, so that no sum overflows; the capacity is a shard's."""
    old = jr.ReplayBuffer(capacity=8, sampler=jr.Prioritized(alpha=1.0, epsilon=0.0), max_uses=1)
    new = over_devices(jr.ReplayBuffer(capacity=4, sampler=jr.Prioritized(alpha=2.0, epsilon=0.0), max_uses=1), 2)
    state = old.add(old.init(items(np.zeros(8))), items(np.arange(8)), td_errors=np.full(8, 1e30, np.float32))
    state = old.update(state, np.array([0, 7]), np.ones(2))
    moved = jr.migrate(old, state, new)
    assert int(new.size(moved)) == 3
    leaves = np.asarray(moved.sampler.tree.sums[-1])
    np.testing.assert_array_equal(leaves > 0, moved.uses.unspent.sums[-1] > 0)
    np.testing.assert_allclose(leaves[leaves > 0], np.full(3, 2.0**62), rtol=1e-5)
    assert int(new.size(new.add(moved, items(np.arange(4))))) == 4
    without = jr.ReplayBuffer(capacity=8, sampler=old.sampler)  # where they are as new
    found = jr.migrate(old, state, without)
    np.testing.assert_allclose(without.priorities(found, np.arange(8)), np.full(8, 2.0**60), rtol=1e-5)


def test_items_of_every_dtype_move():
    batch = {
        "key": jax.random.split(jax.random.key(0), 8),
        "half": np.arange(8, dtype=jnp.bfloat16),
        "flag": np.arange(8) % 3 == 0,
        "frame": np.arange(16, dtype=np.uint8).reshape(8, 2),
        "nothing": np.zeros((8, 0, 2), np.uint8),
    }
    old, new = jr.ReplayBuffer(capacity=8), over_devices(jr.ReplayBuffer(capacity=16), 4)
    state = jr.migrate(old, old.add(old.init(batch), batch), new)
    shard, place = np.divmod(np.arange(8), 2)  # of each row, once it is moved
    found = new.get(state, shard * state.ring.period + place)
    assert_same(found, jax.tree.map(lambda x: x[shard + 4 * place], batch))


@pytest.mark.versions
def test_errors_name_what_differs():
    replay = jr.ReplayBuffer(capacity=8)
    settings = {"length": 8, "num_envs": 2, "sequence_length": 3}
    sequence = jr.SequenceBuffer(**settings)
    state, stepped = replay.init(items(np.zeros(4))), sequence.init(items(np.zeros((1, 2))))
    for arguments, message in (
        ((jr.Uniform(), state, replay), r"old_buffer=Uniform\(\): must be a ReplayBuffer"),
        ((state, replay, replay), r"^old_buffer=ReplayState\(0 of 8 items, .{1,80}: must be"),
        ((replay, state, sequence), "must be a ReplayBuffer like old_buffer"),
        ((jr.ReplayBuffer(capacity=4), state, replay), "capacity=4: this state has"),
        ((over_devices(replay, 2), state, replay), "2 shards: this state has"),
    ):
        rejects(message, jr.migrate, *arguments)
    for name, value in {"num_envs": 4, "sequence_length": 2, "stride": 2, "windows": "cut"}.items():
        other = jr.SequenceBuffer(**settings | {name: value})
        rejects(f"new_buffer.{name}=", jr.migrate, sequence, stepped, other)
