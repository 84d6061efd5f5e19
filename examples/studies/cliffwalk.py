"""Do priorities learn sooner from rare events? The Blind Cliffwalk (Schaul et al. 2016, appendix B.1).

Yes: in the largest buffer, proportional draws need a fourteenth of the updates of uniform draws.

pip install -e '.[examples]'
python examples/studies/cliffwalk.py           # 2 to 16 states, 20 seeds
python examples/studies/cliffwalk.py --short   # half a minute at most, to see that it runs

In each of n states the right action leads on and the wrong one ends the episode. Only the right action of the last
state is rewarded. The buffer holds the transitions of all 2^n sequences of actions: 2^(n+1) - 2 transitions, and one of
them is rewarded. Q-learning replays one transition per update. The study counts the updates until the mean squared
error of the values is below 10^-3, with three ways to choose the transition:

- uniform: `jr.Uniform()`.
- proportional: `jr.Prioritized(alpha=0.6, beta=0)`. Nothing here is stochastic, so there is no bias for weights to
  correct. All transitions start with the largest priority, so nearly all are replayed at least once. In large buffers
  this pass is most of the updates.
- oracle: knows the true values, and chooses the transition whose update leaves the smallest error.

The updates grow with the buffer's size to the power 1.02 [1.01, 1.03] for uniform draws, 0.79 [0.79, 0.80] for
proportional ones and 0.33 [0.33, 0.34] for the oracle.
"""

from collections import namedtuple
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from experiment import Parser, plot, report
from tqdm import tqdm

import jaxreplay as jr

MAX_STATES = 16
CAPACITY = 2 ** (MAX_STATES + 1) - 2
STEP_SIZE = 0.25
THRESHOLD = 1e-3  # on the mean squared error
SAMPLERS = {"uniform": jr.Uniform(), "proportional": jr.Prioritized(alpha=0.6, beta=0.0), "oracle": None}
BATCH = {"uniform": 64, "proportional": 1}  # transitions of one draw, replayed one by one: uniform draws do not change


# A step to state + 1, or to the end if discount is 0; leaves [B].
Transition = namedtuple("Transition", "state action reward discount")


# A Blind Cliffwalk, with array shapes that do not depend on its number of states.
# - replay: `Transition` [CAPACITY], and stored: bool [CAPACITY], the rows of it that exist
# - distinct: `Transition` [2 * MAX_STATES], each one once
# - exists: bool [MAX_STATES]
# - values: float32 [2, MAX_STATES], the true ones
Walk = namedtuple("Walk", "replay stored distinct exists values")


def make_walk(n: int) -> Walk:
    """The walk with n states. The right action of a state is its parity."""
    gamma = 1 - 1 / n

    def transitions(state: np.ndarray, action: np.ndarray) -> Transition:
        right, last = action == state % 2, state == n - 1
        reward, discount = (right & last).astype(np.float32), np.where(right & ~last, gamma, 0).astype(np.float32)
        return Transition(state.astype(np.int32), action.astype(np.int32), reward, discount)

    sequences = np.arange(2**n)[:, None] >> np.arange(n) & 1  # [2^n, n], all sequences of actions
    leads_on = sequences == np.arange(n) % 2
    visited = np.cumprod(np.insert(leads_on, 0, True, axis=1)[:, :-1], axis=1).astype(bool)
    state, action = np.nonzero(visited)[1], sequences[visited]
    unused = (0, CAPACITY - len(state))
    replay = transitions(np.pad(state, unused), np.pad(action, unused))
    states = np.arange(MAX_STATES)
    values = np.where(states < n, gamma ** (n - 1.0 - states), 0)
    return Walk(
        replay=replay,
        stored=np.arange(CAPACITY) < len(state),
        distinct=transitions(np.repeat(states, 2), np.tile([0, 1], MAX_STATES)),
        exists=states < n,
        values=np.where(states % 2 == np.arange(2)[:, None], values, 0).astype(np.float32),
    )


def make_solver(name: str) -> Callable[[jax.Array, Walk], jax.Array]:
    """A jitted function that counts the updates needed with one of `SAMPLERS`.

    It takes keys [seeds] and a walk, and returns int32 [seeds].
    """
    buffer = jr.ReplayBuffer(capacity=CAPACITY, sampler=SAMPLERS[name] or jr.Uniform())

    def solve(keys: jax.Array, walk: Walk) -> jax.Array:
        replay = buffer.add(buffer.init(walk.replay), walk.replay, mask=walk.stored)
        last_state = walk.exists.sum() - 1

        def error(q: jax.Array) -> jax.Array:
            return jnp.sum(jnp.where(walk.exists, (q - walk.values) ** 2, 0)) / (2 * (last_state + 1))

        def learn(q: jax.Array, step: Transition) -> tuple[jax.Array, jax.Array]:
            """Values [2, MAX_STATES] after one update from one transition, and its TD error."""
            next_value = q[:, jnp.minimum(step.state + 1, last_state)].max()
            td_error = step.reward + step.discount * next_value - q[step.action, step.state]
            return q.at[step.action, step.state].add(STEP_SIZE * td_error), td_error

        def replay_one(carry: tuple, step: Transition) -> tuple[tuple, jax.Array]:
            q, updates, solved = carry
            q, td_error = learn(q, step)
            updates += 1
            solved = jnp.where((solved == 0) & (error(q) < THRESHOLD), updates, solved)
            return (q, updates, solved), td_error

        def replay_batch(carry: tuple) -> tuple:
            learner, replay, key = carry
            key, sample_key = jax.random.split(key)
            sample = buffer.sample(replay, sample_key, BATCH[name])
            learner, td_errors = jax.lax.scan(replay_one, learner, sample.items)
            return learner, buffer.update(replay, sample.indices, td_errors), key

        def replay_best(carry: tuple) -> tuple:
            learner, replay, key = carry
            after, _ = jax.vmap(learn, in_axes=(None, 0))(learner[0], walk.distinct)
            best = jnp.argmin(jnp.where(walk.exists[walk.distinct.state], jax.vmap(error)(after), jnp.inf))
            learner, _ = replay_one(learner, jax.tree.map(lambda x: x[best], walk.distinct))
            return learner, replay, key

        def init(key: jax.Array) -> tuple:
            q_key, key = jax.random.split(key)
            q = 0.1 * jax.random.normal(q_key, (2, MAX_STATES + 1))[:, :-1]  # drawn as in the recorded runs
            return (q, jnp.int32(0), jnp.int32(0)), replay, key

        def unsolved(carry: tuple) -> jax.Array:
            (_, _, solved), *_ = carry
            return jnp.any(solved == 0)

        step = jax.vmap(replay_best if name == "oracle" else replay_batch)
        (_, _, solved), *_ = jax.lax.while_loop(unsolved, step, jax.vmap(init)(keys))
        return solved

    return jax.jit(solve)


def slopes(updates: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Slopes of log median updates over log size [1 + 2,000]: of `updates` [sizes, seeds], then of resampled seeds."""
    chosen = np.random.default_rng(0).integers(updates.shape[1], size=(2_000, *updates.shape))
    resampled = np.take_along_axis(updates[None], chosen, axis=2)
    medians = np.median(np.concatenate([updates[None], resampled]), axis=2)
    return np.polyfit(np.log(sizes), np.log(medians).T, 1)[0]


def main() -> None:
    args = Parser("Updates that Q-learning needs on the Blind Cliffwalk.", seeds=20).parse()
    states = range(2, (6 if args.short else MAX_STATES) + 1)
    sizes = 2 ** (np.array(states) + 1) - 2
    curves, figures = {}, {}
    for name in tqdm(SAMPLERS, unit=" solvers"):
        solve = make_solver(name)
        updates = np.stack([solve(args.keys, make_walk(n)) for n in states])
        curves[name], fit = updates.T, slopes(updates, sizes)
        figures[name] = fit[0], *np.percentile(fit[1:], [2.5, 97.5])
        figures[f"{name}, updates in the largest"] = np.median(updates[-1])
    path = args.out / "cliffwalk.png"
    x, y = ("transitions in the buffer", sizes), "updates until the values are learned"
    plot(path, "Blind Cliffwalk", {"": curves}, x, y, xscale="log", yscale="log")
    report(path, f"slope of log median updates over log transitions, {args.seeds} seeds", figures, seeds=args.seeds)


if __name__ == "__main__":
    main()
