"""Checks of JaxGCRL's queue and goals and of the port, in numbers, with JaxGCRL's own code.

JaxGCRL's queue draws windows that are as long as an episode and start at any row, and takes a row's goal from the later
rows of the same window. So the end of the window cuts the episode, and the goals are too near. Rows at both ends of the
queue are drawn seldom. An episode's last row is its own goal. If fewer rows than an episode's are stored, it draws rows
of zeros. It computes a matrix of 1,001 x 1,001 probabilities per window.

The port draws each row by itself, and its goal with `later(law="geometric")` from the whole episode, in O(log(length))
per row.
"""

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jaxgcrl_adapter import Replay, with_goals

EPISODE, LENGTH, ROLLOUT, NUM_ENVS, NEWEST, DRAWS = 50, 500, 25, 8, 20, 200
ADDED = LENGTH + 3 * EPISODE
CONFIG = (0.99, 2, (2,))  # gamma; the state has 2 numbers; the goal is the third number of a later observation
BEFORE_END, EARLY = 20, 40  # rows
FULL = {"num_envs": 32, "episode_length": 1_001}  # JaxGCRL has 256 environments by default


def steps(crl: ModuleType, first: int, count: int, num_envs: int = NUM_ENVS) -> Any:
    """Numbered rows of all environments: the state (number, environment), and the number again, for the goal."""
    number, env = (x.astype(jnp.float32) for x in jnp.mgrid[first : first + count, :num_envs])
    done = (number % EPISODE == EPISODE - 1).astype(jnp.float32)
    extras = {"state_extras": {"truncation": done, "traj_id": 1 + number // EPISODE}}
    return crl.Transition(jnp.stack([number, env, number], axis=-1), number[..., None], -number, 1 - done, extras)


def filled(crl: ModuleType, kind: type, added: int, num_envs: int = NUM_ENVS) -> tuple[Any, Any]:
    """A replay to which `added` rows of each environment were added, and its state."""
    sizes = {"max_replay_size": LENGTH, "sample_batch_size": 1, "num_envs": num_envs, "episode_length": EPISODE}
    replay = kind(dummy_data_sample=jax.tree.map(lambda x: x[0, 0], steps(crl, 0, 1)), **sizes)
    state, insert = replay.init(jax.random.key(0)), jax.jit(replay.insert_internal)
    for first in range(0, added, ROLLOUT):
        state = insert(state, steps(crl, first, min(ROLLOUT, added - first), num_envs))
    return replay, state


def pairs(crl: ModuleType, kind: type) -> Callable:
    """JaxGCRL's function that gives goals to the rows of all environments, or the port's."""
    flatten = with_goals if issubclass(kind, Replay) else crl.flatten_batch
    return jax.vmap(flatten, in_axes=(None, 0, 0))


def drawn(crl: ModuleType, kind: type, added: int = ADDED) -> SimpleNamespace:
    """Rows of many draws: their numbers, the steps to their goals, and if they are as they were added."""
    replay, state = filled(crl, kind, added)

    @jax.jit
    def draw(state: Any, key: jax.Array) -> tuple[Any, Any]:
        state, rows = replay.sample_internal(state)
        return state, pairs(crl, kind)(CONFIG, rows, jax.random.split(key, NUM_ENVS))

    rows = jax.lax.scan(draw, state, jax.random.split(jax.random.key(1), DRAWS))[1]
    rows = jax.tree.map(lambda x: np.asarray(x).reshape(-1, *x.shape[3:]), rows)
    number, env, goal = rows.observation.T
    future = rows.extras["future_state"]
    right = (rows.action.reshape(-1) == number) & (rows.reward == -number) & (number >= added - LENGTH)
    right &= (future == np.stack([goal, env], axis=-1)).all(axis=1) & (goal // EPISODE == number // EPISODE)
    number, lag = number.astype(int), (goal - number).astype(int)
    return SimpleNamespace(number=number, lag=lag, right=right & (lag >= 0), discount=rows.discount)


def distribution(count: int) -> np.ndarray:
    """Probabilities of 1 to `count` steps."""
    mass = CONFIG[0] ** np.arange(count)
    return mass / mass.sum()


def enumerated(crl: ModuleType) -> float:
    """JaxGCRL's mean number of steps to a later row: all windows that its queue draws, by its own probabilities."""
    count, bounds, logits = LENGTH - EPISODE, [], []
    queue, state = filled(crl, crl.TrajectoryUniformSamplingQueue, ADDED, count)

    def every(key: Any, shape: Any, minval: Any, maxval: Any) -> jax.Array:
        bounds.append((int(minval), int(maxval)))
        return jnp.arange(*bounds[-1])

    def kept(key: Any, found: jax.Array) -> jax.Array:
        logits.append(found)
        return jnp.zeros(len(found), jnp.int32)

    def chance(window: Any) -> jax.Array:
        crl.flatten_batch.__wrapped__(CONFIG, window, jax.random.key(0))
        return jax.nn.softmax(logits.pop()[:-1])  # its last row is no state

    with jax.disable_jit(), mock.patch.object(jax.random, "randint", every):
        windows = queue.sample_internal(state)[1]
    assert bounds == [(0, count)], bounds
    with mock.patch.object(jax.random, "categorical", kept):
        found = np.asarray(jax.jit(jax.vmap(chance))(windows), np.float64)
    lag = np.maximum(np.arange(EPISODE)[None] - np.arange(EPISODE - 1)[:, None], 0)
    return float((found * lag).sum() / (found * (lag > 0)).sum())


def rows_at_full_size(crl: ModuleType, count: int) -> Any:
    """Rows of as many numbers as those of a reacher, in episodes of 1,001 steps, as JaxGCRL has them."""
    shape = count, FULL["num_envs"]
    number = jnp.broadcast_to(jnp.arange(count, dtype=jnp.float32)[:, None], shape)
    done = (number % FULL["episode_length"] == FULL["episode_length"] - 1).astype(jnp.float32)
    extras = {"state_extras": {"truncation": done, "traj_id": number // FULL["episode_length"]}}
    return crl.Transition(jnp.ones((*shape, 13)), jnp.ones((*shape, 2)), number, 1 - done, extras)


def at_full_size(crl: ModuleType, kind: type, length: int) -> tuple[Any, Callable]:
    """A replay of such rows, and a function that draws from its state and gives goals."""
    like = jax.tree.map(lambda x: x[0, 0], rows_at_full_size(crl, 1))
    replay = kind(max_replay_size=length, dummy_data_sample=like, sample_batch_size=256, **FULL)

    def draw(state: Any, key: jax.Array) -> Any:
        state, rows = replay.sample_internal(state)
        return state, pairs(crl, kind)((0.99, 10, (4, 5, 6)), rows, jax.random.split(key, FULL["num_envs"]))

    return replay, draw


def temporaries(crl: ModuleType, kind: type) -> tuple[str, str]:
    """Megabytes of temporaries of an insertion of 62 rows into 10,000, and of a draw with goals."""
    replay, draw = at_full_size(crl, kind, 10_000)
    key, added = jax.random.key(0), jax.eval_shape(lambda: rows_at_full_size(crl, 62))
    state = jax.eval_shape(replay.init, key)
    programs = (replay.insert_internal, (state, added)), (draw, (state, key))
    compiled = [jax.jit(of, donate_argnums=0).lower(*args).compile() for of, args in programs]
    return tuple(f"{program.memory_analysis().temp_size_in_bytes / 1e6:.3g}" for program in compiled)


def check(crl: ModuleType) -> list[dict[str, str]]:
    """The results of both versions, by name."""
    kinds = {"original": crl.TrajectoryUniformSamplingQueue, "port": Replay}
    full, early = ({name: drawn(crl, kind, added) for name, kind in kinds.items()} for added in (ADDED, EARLY))
    memory = {name: temporaries(crl, kind) for name, kind in kinds.items()}
    correct = np.mean([distribution(count) @ np.arange(1, count + 1) for count in range(1, EPISODE)])
    newest = (NEWEST - 1) / (LENGTH - LENGTH // EPISODE)

    def mean(name: str) -> str:
        exact = f"; all windows enumerated: {enumerated(crl):.2f}" if name == "original" else ""
        return f"{full[name].lag[full[name].lag > 0].mean():.2f}{exact}"

    def chi_square(name: str) -> str:
        here = full[name].number % EPISODE == EPISODE - 1 - BEFORE_END
        lag = full[name].lag[here & (full[name].lag > 0)]
        expected = distribution(BEFORE_END) * lag.size
        counts = np.bincount(lag, minlength=BEFORE_END + 1)[1:]
        return f"{((counts - expected) ** 2 / expected).sum():.0f} of {lag.size:,}"

    rows: dict[str, Callable[[str], str]] = {
        f"mean number of steps to the goal, in episodes of {EPISODE}, {correct:.2f} if correct": mean,
        f"chi-square of the steps to the goal, {BEFORE_END} rows before an episode's end, 19 ± 12 in 95% of cases": (
            chi_square
        ),
        "draws whose goal is the row itself": lambda name: f"{(full[name].lag == 0).mean():.1%}",
        f"draws of the newest {NEWEST} of {LENGTH} rows, {newest:.1%} if uniform": lambda name: (
            f"{(full[name].number >= ADDED - NEWEST).mean():.1%}"
        ),
        "draws that are not as they were added, or have the goal of another episode": lambda name: (
            f"{(~full[name].right).sum()} of {full[name].right.size:,}"
        ),
        f"draws of rows that were never stored, when {EARLY} rows are": lambda name: (
            f"{(early[name].discount == 0).mean():.1%}"
        ),
        "megabytes of temporaries of an insertion of 62 rows into 10,000 of 32 environments": lambda name: memory[name][
            0
        ],
        "megabytes of temporaries of a draw of 32,000 pairs from them": lambda name: memory[name][1],
    }
    return [{"what": what, **{name: of(name) for name in kinds}} for what, of in rows.items()]
