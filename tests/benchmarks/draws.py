"""(j) Draws alone as the capacity grows, beside draws that cost O(N)."""

import datetime
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax_buffers
from harness import ScanProgram, measure
from jax_buffers import ALPHA, BETA, Buffer, flashbax_trajectory_buffer, zeros_of
from settings import Setting

import jaxreplay as jr

CAPACITIES = (2**12, 2**14, 2**17, 2**20)
BATCH_SIZE = 256
NUM_ENVS, ROWS, SEQUENCE_LENGTH = 16, 64, 16
ROW, STREAMS = (NUM_ENVS * ROWS,), (ROWS, NUM_ENVS)  # leading axes of what is added
PEERS = {
    "rejax": "without replacement",
    "jaxnasium": "without replacement",
    "memorax": "windows: episodes",
    "flashbax": "uniform",
    "flashbax trajectory": "windows: any",
}
BESIDE = PEERS | {"two draws": "mixture"}  # a baseline, written plainly here


def _end(items: dict[str, Any]) -> jax.Array:
    """Which rows end an episode, one of 30."""
    return items["reward"] > 0.97


def _buffer(setting: Setting, init: Callable, add: Callable, draw: Callable, fill: tuple[int, ...]) -> Buffer:
    """A buffer without `update`; `init(items) -> state` and `draw(state, key) -> items`."""
    times = setting.capacity // (NUM_ENVS * ROWS)
    return Buffer(
        init=lambda: init(zeros_of(setting.batch(*fill))),
        add=add,
        sample=lambda state, key: (state, draw(state, key), None, None),
        update=lambda state, handles, td_errors: state,
        added=fill,
        fill=(fill, times),
    )


def _first(items: Any) -> Any:
    """The first step of the first stream."""
    return jax.tree.map(lambda x: x[0, 0], items)


def _ours(setting: Setting, sampler: Any = None, recent: bool = False) -> Buffer:
    """Our buffer; `recent` draws the newest quarter."""
    buffer = jr.ReplayBuffer(capacity=setting.capacity, sampler=sampler or jr.Uniform())
    return _buffer(setting, buffer.init, buffer.add, _drawer(setting, buffer, recent), ROW)


def _windows(setting: Setting, windows: Any, recent: bool = False) -> Buffer:
    """Our buffer of sequences, likewise."""
    buffer = _sequences(setting, windows=windows)
    return _buffer(setting, buffer.init, _adder(buffer), _drawer(setting, buffer, recent), STREAMS)


def _drawer(setting: Setting, buffer: Any, recent: bool) -> Callable:
    newest = getattr(buffer, "length", setting.capacity) // 4  # ages of sequences are in steps of all streams
    max_age = newest if recent else None
    return lambda state, key: buffer.sample(state, key, setting.batch_size, max_age=max_age).items


def _sequences(setting: Setting, sequence_length: int = SEQUENCE_LENGTH, **settings: Any) -> jr.SequenceBuffer:
    sizes = {"length": setting.capacity // NUM_ENVS, "num_envs": NUM_ENVS, "sequence_length": sequence_length}
    return jr.SequenceBuffer(**sizes, **settings)


def _adder(buffer: jr.SequenceBuffer) -> Callable:
    return lambda state, items: buffer.add(state, items, ends=_end(items))


def _epoch(setting: Setting) -> Buffer:
    """Any batch of any pass."""
    buffer = jr.ReplayBuffer(capacity=setting.capacity)

    def draw(state, key):
        step = jax.random.key_data(key)[-1] % (setting.capacity // setting.batch_size)
        return buffer.epoch(state, key, setting.batch_size, step=step.astype(jnp.int32)).items

    return _buffer(setting, buffer.init, buffer.add, draw, ROW)


def _rejax(setting: Setting) -> Buffer:
    """Its draw has a probability for each item stored."""
    from rejax.buffers import ReplayBuffer

    def init(items):
        data = zeros_of(setting.batch(setting.capacity))
        return ReplayBuffer(size=setting.capacity, data=data, index=0, full=False)

    return _buffer(setting, init, ReplayBuffer.extend, lambda x, key: x.sample(setting.batch_size, key), ROW)


def _jaxnasium(setting: Setting) -> Buffer:
    """Its draw without replacement takes the largest of a random number for each item stored."""
    from jaxnasium.algorithms.core import TransitionBuffer

    def init(items):
        one = jax.tree.map(lambda x: x[:1], items)
        return TransitionBuffer(setting.capacity, setting.batch_size, one, vectorized_env=False)

    draw = functools.partial(TransitionBuffer.sample, with_replacement=False)
    return _buffer(setting, init, TransitionBuffer.insert, draw, ROW)


def _experience(buffer: Any) -> Callable:
    return lambda state, key: buffer.sample(state, key).experience


def _memorax(setting: Setting) -> Buffer:
    """Its draw has a probability for each draw and each step stored of a stream."""
    from memorax.buffers import make_episode_buffer

    buffer = make_episode_buffer(
        max_length=setting.capacity,
        min_length=SEQUENCE_LENGTH,
        sample_batch_size=setting.batch_size,
        sample_sequence_length=SEQUENCE_LENGTH,
        get_start_flags=lambda experience: experience["first"],
        add_sequences=True,
        add_batch_size=NUM_ENVS,
    )

    def flagged(items):
        return items | {"first": _end(items)}

    def add(state, items):
        return buffer.add(state, flagged(items))

    return _buffer(setting, lambda items: buffer.init(_first(flagged(items))), add, _experience(buffer), STREAMS[::-1])


def _flashbax_trajectory(setting: Setting) -> Buffer:
    length = setting.capacity // NUM_ENVS
    buffer = flashbax_trajectory_buffer(NUM_ENVS, setting.batch_size, length, SEQUENCE_LENGTH)

    return _buffer(setting, lambda items: buffer.init(_first(items)), buffer.add, _experience(buffer), STREAMS[::-1])


def _later(setting: Setting) -> Buffer:
    """Pairs of rows in one episode, and a later row of it."""
    buffer = _sequences(setting, 2, windows="inside", hindsight=True)

    def draw(state, key):
        drawn, key = buffer.sample(state, key, setting.batch_size), jax.random.fold_in(key, 1)
        later, _ = buffer.later(state, key, drawn.indices, law="geometric", gamma=0.99)
        return drawn.items | {f"later {name}": x for name, x in later.items()}

    return _buffer(setting, buffer.init, _adder(buffer), draw, STREAMS)


def _halves(setting: Setting, mixture: bool) -> Buffer:
    """Half of a batch from each of two buffers: by a `Mixture`, or by two calls and a concatenation."""
    part = jr.ReplayBuffer(capacity=setting.capacity // 2)
    both = jr.Mixture(buffers=(part, part))

    def add(state, items):
        first, second = jax.tree.map(lambda x: x[::2], items), jax.tree.map(lambda x: x[1::2], items)
        return both.add(both.add(state, 0, first), 1, second)

    def draw(state, key):
        if mixture:
            return both.sample(state, key, setting.batch_size).items
        keys = jax.random.split(key)
        parts = [part.sample(x, k, setting.batch_size // 2).items for x, k in zip(state, keys, strict=True)]
        return jax.tree.map(lambda *x: jnp.concatenate(x), *parts)

    return _buffer(setting, both.init, add, draw, ROW)


PRIORITIZED = jr.Prioritized(alpha=ALPHA, beta=BETA)
DRAWS: dict[str, Callable[[Setting], Buffer]] = {
    "uniform": _ours,
    "without replacement": functools.partial(_ours, sampler=jr.Uniform(replacement=False)),
    "epoch": _epoch,
    "uniform, max_age": functools.partial(_ours, recent=True),
    "prioritized": functools.partial(_ours, sampler=PRIORITIZED),
    "prioritized, max_age": functools.partial(_ours, sampler=PRIORITIZED, recent=True),
    "windows: any": functools.partial(_windows, windows="any"),
    "windows: inside": functools.partial(_windows, windows="inside"),
    "windows: inside, max_age": functools.partial(_windows, windows="inside", recent=True),
    "windows: episodes": functools.partial(_windows, windows="episodes"),
    "later": _later,
    "mixture": functools.partial(_halves, mixture=True),
    "two draws": functools.partial(_halves, mixture=False),
    "rejax": _rejax,
    "jaxnasium": _jaxnasium,
    "memorax": _memorax,
    "flashbax": functools.partial(jax_buffers.flashbax_item, uniform=True),
    "flashbax trajectory": _flashbax_trajectory,
}


def _program(name: str, capacity: int, batch_size: int) -> ScanProgram:
    """A draw a step; the batch stays in the carry.

    Numbers of the state might change with the batch, though they never do. So what is computed from them is computed
    at each draw, as between additions, and not once before the scan.
    """
    setting = Setting(capacity=capacity, batch_size=batch_size)
    buffer = DRAWS[name](setting)

    def step(carry, key):
        state, items, _, _ = buffer.sample(carry[0], key)
        never = items["reward"].reshape(-1)[0] < 0
        return jax.tree.map(lambda x: x if x.ndim else jnp.where(never, jnp.zeros_like(x), x), state), items

    state = buffer.full(setting)
    spec = jax.eval_shape(step, (state, None), jax.random.key(0))[1]
    return ScanProgram(step, (state, zeros_of(spec)))


def run(smoke: bool, libraries: set[str]) -> dict[str, Any]:
    """Figures by draw and capacity, all measured in turn; of others than `libraries` none.

    Ratios of ours are to the smallest capacity, those of others and of baselines to ours at the same.
    """
    runs, run_seconds = (2, 0.002) if smoke else (21, 0.04)
    capacities, batch_size = ((2**10,), 32) if smoke else (CAPACITIES, BATCH_SIZE)
    names = [name for name in DRAWS if name not in PEERS or name.split()[0] in libraries]
    makers = {(name, n): functools.partial(_program, name, n, batch_size) for name in names for n in capacities}

    def base(key: tuple[str, int]) -> tuple[str, int]:
        name, capacity = key
        return (BESIDE[name], capacity) if name in BESIDE else (name, capacities[0])

    figures = measure(makers, base, runs, run_seconds)
    draws = {name: {str(n): figures[name, n] for n in capacities} for name in names}
    today = datetime.date.today().isoformat()
    return {"date": today, "runs": runs, "batch_size": batch_size, "draws": draws}
