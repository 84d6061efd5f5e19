"""Random steps of environments, and the calls that trace them."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxreplay as jr

DISCOUNTS = (0.0, 0.5, 0.97, 1.0)
ARGUMENTS = ("s", "a", "r", "terminated", "truncated", "s_next")


def make_steps(rng, length, num_envs, first=0, discounts=False, rates=None):
    """Steps of random environments, each with its own number, from `first` on; those that are none are of NaN.

    `rates`: of terminated and truncated steps, and of those that are none.
    """
    shape = length, num_envs
    if rates is None:
        rates = *rng.choice([0.0, 0.1, 0.5, 0.9], 2, p=[0.4, 0.3, 0.2, 0.1]), rng.choice([0.0, 0.1, 0.4])
    ids = first + np.arange(length * num_envs, dtype=np.float32).reshape(shape)
    mask = rng.random(shape) >= rates[2]
    x = np.where(mask, ids, np.nan).astype(np.float32)
    steps = {
        "s": {"x": np.stack([x, -x], axis=-1)},
        "a": ids.astype(np.int32),
        "r": np.where(mask, rng.standard_normal(shape), np.nan).astype(np.float32),
        "terminated": rng.random(shape) < rates[0],
        "truncated": rng.random(shape) < rates[1],
        "s_next": {"x": np.stack([x + 0.5, -x], axis=-1)},  # also at an episode's end: not the next one's first
        "logp": -x / 64,
        "w": x / 32,
        "mask": mask,
    }
    if discounts:  # of some environments the same in all steps
        each = np.where(rng.random(num_envs) < 0.3, rng.choice(DISCOUNTS, num_envs), rng.choice(DISCOUNTS, shape))
        steps["discount"] = np.where(mask, each, np.nan).astype(np.float32)
    return steps


def first(steps):
    """What `init` wants to know of a rollout."""
    return {name: jax.tree.map(lambda x: x[0], leaf) for name, leaf in steps.items() if name != "mask"}


def empty(tracer, steps):
    """A state of NumPy arrays, where only an error is looked at: nothing is compiled."""
    return jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), jax.eval_shape(lambda: tracer.init(**first(steps))))


def traced(tracer, steps, gamma=None):
    """By `add` in a scan, and `flush`."""

    def step(state, x):
        state, *emitted = tracer.add(state, **x, gamma=gamma)
        return state, emitted

    state, emitted = lax.scan(step, tracer.init(**first(steps)), steps)
    rest = [*tracer.flush(state, gamma=gamma)[1:]]
    return jax.tree.map(lambda x, y: jnp.concatenate([x.reshape(-1, *x.shape[2:]), y]), emitted, rest)


one_by_one = jax.jit(traced, static_argnums=0)


def others(steps):
    return {"logP": steps["logp"], "W": steps["w"], "mask": steps["mask"], "discounts": steps.get("discount")}


def at_once(steps, **arguments):
    return jr.n_step_transitions(*[steps[name] for name in ARGUMENTS], **others(steps), **arguments)


def of_sequences(rows, **arguments):
    return jr.sequence_transitions(*[rows[name] for name in ARGUMENTS[:-1]], **others(rows), **arguments)


def turned(steps):
    """[T, num_envs] as sequences [B, L], or the other way round."""
    return jax.tree.map(lambda x: x.swapaxes(0, 1), steps)


def make_rows(rng, batch_size, length, first=0, discounts=False, rates=None):
    """Sequences [B, L] of rows as a SequenceBuffer draws them: some truncated steps lack the row behind them."""
    steps = make_steps(rng, length, batch_size, first, discounts, rates)
    mask = steps["mask"]
    if length > 1:  # most rows behind an end hold no step, as final observations do
        ends = steps["terminated"] | steps["truncated"]
        mask[1:] &= ~(ends[:-1] & (rng.random(ends[1:].shape) < 0.7))
    steps["s"]["x"] = np.where(np.isnan(steps["s"]["x"]), -1e3, steps["s"]["x"])  # observations are there anyhow
    return turned(steps)
