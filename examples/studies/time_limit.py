"""What does a time limit do to learned values?

Nothing with `jr.NStep`, which learns 100; without the bootstrap at the limit it is 33.1 [33.0, 33.1] for n = 3.

pip install -e '.[examples]'
python examples/studies/time_limit.py           # 8 seeds
python examples/studies/time_limit.py --short   # a second, to see that it runs

Two environments give a reward of 1 per step and are truncated after 50 steps. The task itself goes on for ever, so with
a discount of 0.99 every state has value 100 (Pardo et al. 2018, section 3). In the first, all observations are equal.
In the second, the first step of an episode has its own observation and costs 10. Values are learned by n-step TD with
`jr.NStep` and a `jr.ReplayBuffer`, and again with each of four common mistakes.
"""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from experiment import Parser, report

import jaxreplay as jr

GAMMA, LIMIT, FEE = 0.99, 50, 10.0
NUM_ENVS, BATCH = 8, 256
CAPACITY = 4 * LIMIT * NUM_ENVS  # so that every step of an episode is stored equally often
RIGHT, AS_TERMINATION, ONE_GAMMA, RESET_OBSERVATION, NO_END = range(5)
WAYS = {
    RIGHT: "correct, with `NStep`",
    AS_TERMINATION: "truncation treated as termination",
    ONE_GAMMA: "bootstrap with gamma instead of gamma^n",
    RESET_OBSERVATION: "next observation taken after the reset",
    NO_END: "returns that continue into the next episode",
}
ENVIRONMENTS = {"one observation": False, "costly first step": True}


@partial(jax.jit, static_argnums=(0, 1))
def learn(n: int, updates: int, way: jax.Array, first_differs: jax.Array, key: jax.Array) -> jax.Array:
    """Values [2] of an ordinary step and of a first step, learned from n-step returns in one of `WAYS`.

    They are means over the second half of the updates.
    """
    tracer = jr.NStep(n=n, gamma=GAMMA, num_envs=NUM_ENVS)
    buffer = jr.ReplayBuffer(capacity=CAPACITY)

    def env_step(t: jax.Array) -> tuple:
        ends = jnp.full(NUM_ENVS, t % LIMIT == LIMIT - 1)
        first = jnp.full(NUM_ENVS, first_differs & (t % LIMIT == 0))
        reward = jnp.where(first, -FEE, 1.0)
        after_reset = jnp.where(first_differs & ends, 1, 0)
        s_next = jnp.where((way == RESET_OBSERVATION) | (way == NO_END), after_reset, 0)
        terminated = ends & (way == AS_TERMINATION)
        truncated = ends & (way != AS_TERMINATION) & (way != NO_END)
        action = jnp.zeros(NUM_ENVS, jnp.int32)
        return first.astype(jnp.int32), action, reward, terminated, truncated, s_next

    def update(carry: tuple, t: jax.Array) -> tuple[tuple, jax.Array]:
        tracing, replay, values, key = carry
        key, sample_key = jax.random.split(key)
        tracing, batch, _ = tracer.add(tracing, *env_step(t))
        batch = batch.replace(In=jnp.where((way == ONE_GAMMA) & (batch.In > 0), GAMMA, batch.In))
        replay = buffer.add(replay, batch)
        sample = buffer.sample(replay, sample_key, BATCH)
        batch, weights = sample.items, sample.weights
        td_errors = batch.Rn + batch.In * values[batch.S_next] - values[batch.S]
        total = jnp.zeros(2).at[batch.S].add(weights * td_errors)
        count = jnp.zeros(2).at[batch.S].add(weights)
        values = values + 0.5 * total / jnp.maximum(count, 1)
        return (tracing, replay, values, key), values

    step = jax.eval_shape(env_step, jnp.int32(0))
    carry = tracer.init(*step), buffer.init(tracer.spec(*step)), jnp.zeros(2), key
    _, values = jax.lax.scan(update, carry, jnp.arange(updates))
    return values[updates // 2 + 1 :].mean(axis=0)


def learn_all(n: int, updates: int, seed: int = 0) -> np.ndarray:
    """Results of `learn` for each environment and way, [len(ENVIRONMENTS), len(WAYS), 2]."""
    ways, keys = jnp.array(list(WAYS)), jax.random.split(jax.random.key(seed), len(WAYS))
    one_env = jax.vmap(partial(learn, n, updates), in_axes=(0, None, 0))
    return np.stack([one_env(ways, first_differs, keys) for first_differs in ENVIRONMENTS.values()])


def main() -> None:
    args = Parser("Values learned under a time limit, with correct and incorrect handling.", seeds=8).parse()
    updates, seeds, figures = 200 if args.short else 10_000, range(args.seed, args.seed + args.seeds), {}
    values = {n: np.stack([learn_all(n, updates, seed) for seed in seeds]) for n in (1, 3)}
    for (way, name), (i, env), n in itertools.product(WAYS.items(), enumerate(ENVIRONMENTS), values):
        figures[f"{name}, {env}, n={n}"] = values[n][:, i, way, 0]
    path = args.out / "time_limit.json"
    report(path, f"value of an ordinary step, {args.seeds} seeds; the right one is 100", figures, 1)


if __name__ == "__main__":
    main()
