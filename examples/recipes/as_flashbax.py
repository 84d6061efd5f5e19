"""As flashbax: an agent written for flashbax 0.1.3 changes one import.

`import as_flashbax as fbx`, with this file beside the agent. What differs:

- A key gives other draws. With a `period` above 1 a full uniform buffer counts starts
  from the first step ever, flashbax from the oldest step. A buffer needs at least
  `sample_sequence_length + period - 1` steps of time.
- `indices` are handles, not positions: `set_priorities` ignores overwritten sequences.
- A new sequence gets the largest priority so far. flashbax rounds its power down.
- A NaN priority is ignored, and of a negative one the absolute value counts.
- A state has fields of its own; `experience` reads all rows, in flashbax's axes. Its
  type, and those of buffers and samples, have the names that agents annotate with.
- `add(state, batch, mask)` takes a flag in place of a `lax.cond` around it.
- `sample` of an empty buffer is an error, unless compiled by the caller. A batch may
  be larger than the buffer. `device` is ignored.
- Mixers and queues are `jr.Mixture`, and `newest` of a buffer.
"""

import collections
import dataclasses
import types

import chex
import flax
import jax
import jax.numpy as jnp

import jaxreplay as jr

Sample = collections.namedtuple("Sample", "experience indices probabilities")
ExperiencePair = collections.namedtuple("ExperiencePair", "first second")


@flax.struct.dataclass(kw_only=True)
class State(jr.buffers.SequenceState):
    __class_getitem__ = classmethod(lambda cls, _: cls)  # in annotations

    @property
    def experience(self):
        """Rows [num_envs, T, ...], zeros where none is stored."""

        def leaf(x):
            if isinstance(x, jax.Array):
                return x.swapaxes(0, 1)
            raise ValueError("state.experience: stored otherwise here; read a sample.")

        return jax.tree.map(leaf, self.storage, is_leaf=lambda x: hasattr(x, "shape"))


@chex.dataclass(frozen=True)
class Buffer:
    init: object
    add: object
    sample: object
    can_sample: object
    set_priorities: object

    __class_getitem__ = classmethod(lambda cls, _: cls)


names = {"BufferState": State, "BufferSample": Sample, "ExperiencePair": ExperiencePair}
for kind in ("Trajectory", "PrioritisedTrajectory"):
    names |= {kind + "Buffer": Buffer, kind + "BufferState": State}
    names |= {kind + "BufferSample": Sample}
names |= {"TransitionSample": Sample, "PrioritisedTransitionSample": Sample}
trajectory_buffer = flat_buffer = item_buffer = types.SimpleNamespace(**names)
prioritised_trajectory_buffer = prioritised_flat_buffer = trajectory_buffer
prioritised_item_buffer = trajectory_buffer


def make(to_rows, to_sample, batch_size, min_rows, **settings):
    """A buffer. `to_rows` makes an added array one of rows, [T, num_envs, ...]."""
    buffer = jr.SequenceBuffer(**settings, donate=False)
    lead, min_rows = (1, buffer.num_envs), max(min_rows, buffer.sequence_length)
    if min_rows > buffer.length:
        raise ValueError(f"{buffer.length} rows are stored: the minimum is {min_rows}.")

    def init(experience):
        rows = jax.tree.map(lambda x: jnp.full(lead + jnp.shape(x), x), experience)
        state = buffer.init(rows)
        fields = {x.name: getattr(state, x.name) for x in dataclasses.fields(state)}
        return State(**fields)

    def add(state, batch, mask=None):
        rows = jax.tree.map(lambda x: to_rows(jnp.asarray(x)), batch)
        return buffer.add(state, rows, mask=mask)

    def sample(state, rng_key):
        found = buffer.sample(state, rng_key, batch_size)
        experience = to_sample(lambda at: jax.tree.map(lambda x: x[:, at], found.items))
        return Sample(experience, found.indices, found.probabilities)

    def can_sample(state):
        return buffer.stored_steps(state) >= buffer.num_envs * min_rows

    def set_priorities(state, indices, priorities):
        return buffer.update(state, indices, priorities)

    more = {"can_sample": can_sample, "set_priorities": set_priorities}
    return Buffer(init=init, add=add, sample=sample, **more)


def make_trajectory_buffer(
    add_batch_size,
    sample_batch_size,
    sample_sequence_length,
    period,
    min_length_time_axis,
    max_size=None,
    max_length_time_axis=None,
    **sampler,
):
    if (max_size is None) == (max_length_time_axis is None):
        raise ValueError("give one of max_size and max_length_time_axis.")
    length = max_length_time_axis or max_size // add_batch_size
    if sampler:
        length -= length % period  # as flashbax
    sizes = {"num_envs": add_batch_size, "sequence_length": sample_sequence_length}
    how = lambda x: x.swapaxes(0, 1), lambda steps: steps(slice(None))
    draw = sample_batch_size, min_length_time_axis
    return make(*how, *draw, length=length, stride=period, **sizes, **sampler)


def make_flat_buffer(
    max_length,
    min_length,
    sample_batch_size,
    add_sequences=False,
    add_batch_size=None,
    **sampler,
):
    num_envs = add_batch_size or 1

    def to_rows(x):
        x = x[None] if add_batch_size is None else x
        return (x if add_sequences else x[:, None]).swapaxes(0, 1)

    sizes = {"length": max_length // num_envs, "num_envs": num_envs}
    how = to_rows, lambda steps: ExperiencePair(steps(0), steps(1))
    draw = sample_batch_size, min_length // num_envs + 1
    return make(*how, *draw, sequence_length=2, **sizes, **sampler)


def make_item_buffer(
    max_length,
    min_length,
    sample_batch_size,
    add_sequences=False,
    add_batches=False,
    **sampler,
):
    num_axes = add_sequences + add_batches
    sizes = {"length": max_length, "num_envs": 1, "sequence_length": 1}
    how = lambda x: x.reshape(-1, 1, *x.shape[num_axes:]), lambda steps: steps(0)
    return make(*how, sample_batch_size, min_length, **sizes, **sampler)


def prioritised(make_buffer):
    def make_prioritised(*sizes, priority_exponent=0.6, device="cpu", **named):
        settings = {"beta": 0.0, "epsilon": 0.0, "normalize": None}
        sampler = jr.Prioritized(alpha=priority_exponent, **settings)
        return make_buffer(*sizes, **named, sampler=sampler)

    return make_prioritised


make_prioritised_trajectory_buffer = prioritised(make_trajectory_buffer)
make_prioritised_flat_buffer = prioritised(make_flat_buffer)
make_prioritised_item_buffer = prioritised(make_item_buffer)


if __name__ == "__main__":  # an agent of flashbax: eight walkers in a corridor
    buffer = make_prioritised_flat_buffer(8_000, 64, 64, add_batch_size=8)

    def train_step(carry, key):
        cell, q, replay = carry
        act_key, draw_key = jax.random.split(key)
        action = jax.random.randint(act_key, (8,), 0, 2, jnp.int32)
        after = jnp.clip(cell + 2 * action - 1, 0, 5)
        replay = buffer.add(replay, {"cell": cell, "action": action, "end": after == 5})
        batch = buffer.sample(replay, draw_key)
        first, second = batch.experience
        targets = jnp.where(first["end"], 1, 0.99 * q[second["cell"]].max(axis=1))
        at = first["cell"], first["action"]
        td_errors = jnp.where(buffer.can_sample(replay), targets - q[at], 0)
        replay = buffer.set_priorities(replay, batch.indices, jnp.abs(td_errors) + 0.01)
        return (after % 5, q.at[at].set(q[at] + td_errors), replay), None

    zeros = jnp.zeros(8, jnp.int32)
    replay = buffer.init({"cell": zeros[0], "action": zeros[0], "end": zeros[0] > 0})
    carry = zeros, jnp.zeros((6, 2), jnp.float32), replay
    keys = jax.random.split(jax.random.key(0), 500)
    (_, q, _), _ = jax.lax.scan(train_step, carry, keys)
    values = q[:5].max(axis=1)
    print("values on the way:", *(f"{x:.3f}" for x in values))  # 0.961 to 1
