import jax
import jax.numpy as jnp
import numpy as np
import seeds

from jaxreplay.curricula import _pool_moves as _moves
from jaxreplay.curricula import _pool_state as _state


def test_each_task_is_written_once(monkeypatch):
    written, update = [], _moves.sum_tree.update

    def recording(tree, moved, *arguments, **named):
        written.append(moved)
        return update(tree, moved, *arguments, **named)

    monkeypatch.setattr(_moves.sum_tree, "update", recording)
    rng, counts, caps = seeds.rng("written once"), np.array([4], np.int32), np.array([[1, 1]], np.int32)

    @jax.jit
    def move(state, task, label):
        env, known = jnp.zeros(12, jnp.int32), jnp.ones(12, bool)
        state = _moves.move(state, jnp.array(counts), jnp.array(caps), task, env, label, known)
        return state, written.pop()

    state = jax.jit(_state.arrange, static_argnums=3)(counts, caps, np.zeros(4, np.int32), ())
    for _ in range(4):
        state, tasks = move(state, *(rng.integers(0, most, 12).astype(np.int32) for most in (4, 3)))
        tasks = np.asarray(tasks)[np.asarray(tasks) < 4]
        assert 0 < len(tasks) == len(set(tasks.tolist()))
