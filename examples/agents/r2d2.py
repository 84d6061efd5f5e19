"""R2D2: a recurrent Q-learner on stored sequences, against a feed-forward agent of the same size.

pip install -e '.[examples]'
python examples/agents/r2d2.py                 # CartPole without velocities: both agents, 8 seeds each
python examples/agents/r2d2.py --task memory   # MemoryChain: the last action repeats the bit of the first step
python examples/agents/r2d2.py --windows episodes  # learns from whole episodes instead of overlapping sequences
python examples/agents/r2d2.py --refresh       # writes fresh recurrent states back into the buffer
python examples/agents/r2d2.py --short         # a few seconds, to see that it runs

After Kapturowski et al. 2019 (Recurrent Experience Replay in Distributed Reinforcement Learning): overlapping
sequences, the recurrent state stored with every step, burn-in, and sequence priorities.

On CartPole the return is 459 [410, 500], from whole episodes 354 [249, 451], whose settings were not tuned, and with
fresh states 454 [384, 496]; without memory it is 38 [37, 39]. On MemoryChain, where 1 is the best, it is 0.98 [0.97,
1.00], from whole episodes 0.96 [0.94, 0.99], and with fresh states the same in every seed.
"""

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import flax.linen as nn
import gymnax
import jax
import jax.numpy as jnp
import optax
from experiment import Parser, integer, interval, learning_curves, plot, print_table, run, save, with_final_rows
from flax import struct

import jaxreplay as jr

LAST_EPISODES = 50  # a seed's return is the mean over this many training episodes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """A partially observed environment.

    Attributes:
      name: its name in titles.
      best: the highest return.
      steps: updates that suffice for it.
      longest: steps of the longest episode.
      make: () -> environment, parameters.
      see: observation -> its visible part.
    """

    name: str
    best: float
    steps: int
    longest: int
    make: Callable[[], tuple[Any, Any]]
    see: Callable[[jax.Array], jax.Array] = lambda obs: obs


def memory_chain() -> tuple[Any, Any]:
    env, params = gymnax.make("MemoryChain-bsuite")
    return env, params.replace(memory_length=20)


TASKS = {
    "cartpole": Task(
        name="CartPole without velocities",
        best=500.0,
        steps=4_000,
        longest=500,
        make=lambda: gymnax.make("CartPole-v1"),
        see=lambda obs: obs[..., jnp.array([0, 2])],
    ),
    "memory": Task(name="MemoryChain, 20 steps", best=1.0, steps=3_000, longest=21, make=memory_chain),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Static settings. One step makes a rollout in each of a seed's environments, and then one update."""

    task: Task
    recurrent: bool
    steps: int
    num_envs: int = 16
    rollout: int = 8  # environment steps per step
    warmup: int = 10  # steps before the first update
    intervals: int = 50  # progress reports
    length: int = 10_000  # steps kept per environment
    windows: Literal["any", "episodes"] = "any"
    sequence_length: int = 32
    stride: int = 8
    burn_in: int = 4
    refresh: bool = False  # write fresh recurrent states back
    batch_size: int = 32
    n: int = 3
    gamma: float = 0.99
    units: int = 32
    learning_rate: float = 1e-3  # falls to 0
    target_rate: float = 0.02
    epsilon: float = 0.02
    exploration: float = 0.3  # fraction of the steps in which epsilon falls from 1


def whole_episodes(task: Task) -> dict[str, Any]:
    """Settings for whole episodes, which start from the zero state, as stored, and need no burn-in."""
    length = task.longest + Config.n  # the last n rows of a sequence start no transition
    warmup = length // Config.rollout + 1  # steps until a sequence is complete
    sequences = {"sequence_length": length, "stride": 1, "burn_in": 0, "batch_size": 4}
    return {"windows": "episodes", "warmup": warmup, **sequences}


class Network(nn.Module):
    """Action values [..., num_actions] from one observation and the recurrent state before it."""

    recurrent: bool
    units: int
    num_actions: int

    @nn.compact
    def __call__(self, carry: jax.Array, obs: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = nn.relu(nn.Dense(self.units)(obs))
        if self.recurrent:
            # Flax's default is orthogonal. On few cores, several concurrent batched QR factorizations can wait for each
            # other forever (jaxlib 0.10).
            carry, x = nn.GRUCell(self.units, recurrent_kernel_init=nn.initializers.lecun_normal())(carry, x)
        else:  # as many parameters as the GRU has
            x = nn.relu(nn.Dense(self.units)(nn.relu(nn.Dense(3 * self.units)(x))))
        return carry, nn.Dense(self.num_actions)(nn.relu(nn.Dense(self.units)(x)))


def squash(x: jax.Array) -> jax.Array:
    """The value rescaling, which keeps large returns small (Kapturowski et al. 2019, section 2.3)."""
    return jnp.sign(x) * (jnp.sqrt(jnp.abs(x) + 1) - 1) + 1e-3 * x


def unsquash(y: jax.Array) -> jax.Array:
    """The inverse of `squash`."""
    root = (jnp.sqrt(1 + 4e-3 * (jnp.abs(y) + 1 + 1e-3)) - 1) / 2e-3
    return jnp.sign(y) * (root**2 - 1)


@struct.dataclass
class State:
    env: jr.transitions.AutoresetState
    obs: jax.Array  # [num_envs, ...]
    carry: jax.Array  # [num_envs, units]
    episode_return: jax.Array  # [num_envs]
    buffer: jr.buffers.SequenceState
    params: Any
    target_params: Any
    opt: optax.OptState
    key: jax.Array


def make_buffer(config: Config) -> jr.SequenceBuffer:
    return jr.SequenceBuffer(
        length=config.length,
        num_envs=config.num_envs,
        sequence_length=config.sequence_length,
        stride=config.stride,
        windows=config.windows,
        sampler=jr.Prioritized(alpha=0.9, beta=0.6),
    )


def make_agent(config: Config) -> tuple[Callable, Callable, Callable]:
    """The agent of one seed as three pure functions: init, act, learn."""
    env, env_params = config.task.make()
    network = Network(config.recurrent, config.units, env.num_actions)
    rate = optax.linear_schedule(config.learning_rate, 0.0, config.steps)
    optimizer = optax.chain(optax.clip_by_global_norm(10.0), optax.adam(rate))
    buffer = make_buffer(config)

    # The final observation of every episode becomes a row of its own, so that sequences hold all that a target needs.
    env_rows = with_final_rows(env, env_params, config.task.see)

    def step_envs(state: State, epsilon: jax.Array | float) -> tuple[State, dict[str, jax.Array]]:
        key, explore_key, action_key, env_key = jax.random.split(state.key, 4)
        carry, q = network.apply(state.params, state.carry, state.obs)
        random = jax.random.randint(action_key, (config.num_envs,), 0, env.num_actions)
        explore = jax.random.uniform(explore_key, (config.num_envs,)) < epsilon
        action = jnp.where(explore, random, jnp.argmax(q, axis=-1))
        env_keys = jax.random.split(env_key, config.num_envs)
        new_env, obs, reward, terminated, truncated, step = jax.vmap(env_rows.step)(state.env, action, env_keys)
        row = {"obs": state.obs, "carry": state.carry, "action": action, "reward": reward}
        row |= {"terminated": terminated, "truncated": truncated, "step": step}
        carry = jnp.where(step[:, None], carry, 0.0)  # the row without a step was the episode's last
        return state.replace(env=new_env, obs=obs, carry=carry, key=key), row

    def init(key: jax.Array) -> State:
        key, params_key, env_key = jax.random.split(key, 3)
        obs, env_state = jax.vmap(env.reset, in_axes=(0, None))(jax.random.split(env_key, config.num_envs), env_params)
        obs = config.task.see(obs)
        carry, zeros = jnp.zeros((config.num_envs, config.units)), jnp.zeros(config.num_envs)
        params = network.init(params_key, carry, obs)
        env_rows_state = jax.vmap(env_rows.init)(env_state, obs)
        state = State(env_rows_state, obs, carry, zeros, None, params, params, optimizer.init(params), key)
        _, row = jax.eval_shape(step_envs, state, 1.0)  # only shapes
        rollout = jax.tree.map(lambda x: jax.ShapeDtypeStruct((config.rollout, *x.shape), x.dtype), row)
        return state.replace(buffer=buffer.init(rollout))

    def act(state: State, epsilon: jax.Array | float) -> tuple[State, jax.Array]:
        """The state after a rollout, and returns [rollout, num_envs] of the episodes that ended, NaN where none did."""
        new, rows = jax.lax.scan(lambda s, _: step_envs(s, epsilon), state.replace(buffer=None), length=config.rollout)

        def count(total: jax.Array, row: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
            total, done = total + row["reward"], row["terminated"] | row["truncated"]
            return jnp.where(done, 0.0, total), jnp.where(done, total, jnp.nan)

        episode_return, returns = jax.lax.scan(count, state.episode_return, rows)
        new = new.replace(buffer=buffer.add(state.buffer, rows, ends=~rows["step"]), episode_return=episode_return)
        return new, returns

    def unroll(params: Any, carry: jax.Array, items: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The state after the sequences, the states [B, L, units] at their steps, and values [B, L, num_actions].

        `carry` [B, units] is the state at the first step.
        """

        def step(carry: jax.Array, row: dict[str, jax.Array]) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
            new, q = network.apply(params, carry, row["obs"])
            return jnp.where(row["step"][:, None], new, 0.0), (carry, q)

        by_time = {name: items[name].swapaxes(0, 1) for name in ("obs", "step")}
        carry, (carries, q) = jax.lax.scan(step, carry, by_time)
        return carry, carries.swapaxes(0, 1), q.swapaxes(0, 1)

    def learn(state: State) -> State:
        """One update from one batch of sequences."""
        key, sample_key = jax.random.split(state.key)
        sample = buffer.sample(state.buffer, sample_key, config.batch_size)
        before, items = jr.split_burn_in(sample.items, config.burn_in)
        mask = items["step"] & sample.mask[:, config.burn_in :]  # with "episodes", without the steps of the next one

        def values(params: Any) -> tuple[jax.Array, jax.Array]:
            carry, _, _ = unroll(params, sample.items["carry"][:, 0], before)
            _, carries, q = unroll(params, jax.lax.stop_gradient(carry), items)
            return carries, q

        _, target_values = values(state.target_params)

        def loss_fn(params: Any) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
            carries, q = values(params)
            seen, rest = {"q": q, "target": target_values}, ("action", "reward", "terminated", "truncated")
            steps = [items[name] for name in rest]
            batch, valid = jr.sequence_transitions(seen, *steps, n=config.n, gamma=config.gamma, mask=mask)
            rows = jnp.arange(batch.batch_size)
            following = jax.lax.stop_gradient(batch.S_next)
            best = following["target"][rows, jnp.argmax(following["q"], axis=-1)]
            target = squash(batch.Rn + batch.In * unsquash(best))
            td_errors = jnp.where(valid, target - batch.S["q"][rows, batch.A], 0.0)
            td_errors, valid = (x.reshape(config.batch_size, -1) for x in (td_errors, valid))
            losses = jnp.sum(optax.huber_loss(td_errors), axis=1) / jnp.maximum(jnp.sum(valid, axis=1), 1)
            return jnp.mean(sample.weights * losses), (jr.sequence_priority(td_errors, valid), carries)

        grads, (priorities, carries) = jax.grad(loss_fn, has_aux=True)(state.params)
        updates, opt = optimizer.update(grads, state.opt)
        params = optax.apply_updates(state.params, updates)
        target_params = optax.incremental_update(params, state.target_params, config.target_rate)
        buffer_state = buffer.update(state.buffer, sample.indices, priorities)
        if config.refresh:  # only states after burn-in; the earlier ones still depend on a stored state
            refreshed = jnp.arange(config.sequence_length) >= config.burn_in
            fresh = sample.items["carry"].at[:, config.burn_in :].set(carries)
            leaves = {name: fresh if name == "carry" else None for name in sample.items}
            buffer_state = buffer.set(buffer_state, sample.indices, leaves, mask=sample.mask & refreshed)
        return state.replace(buffer=buffer_state, params=params, target_params=target_params, opt=opt, key=key)

    return init, act, learn


def num_parameters(config: Config) -> int:
    init, _, _ = make_agent(config)
    return sum(x.size for x in jax.tree.leaves(jax.eval_shape(init, jax.random.key(0)).params))


def parse_args() -> argparse.Namespace:
    parser = Parser("R2D2 and a feed-forward agent on a task that needs memory.")
    parser.add_experiment(seeds=8)
    defaults = ", ".join(f"{task.steps} for {name}" for name, task in TASKS.items())
    parser.add_argument("--steps", type=integer(1), help=f"updates per seed and agent ({defaults}; 50 if short)")
    parser.add_argument("--task", choices=TASKS, default="cartpole", help="the environment (cartpole)")
    parser.add_argument("--windows", choices=("any", "episodes"), default="any", help="sequences that are drawn (any)")
    parser.add_argument("--refresh", action="store_true", help="write recurrent states back into the buffer")
    args = parser.parse()
    args.steps = args.steps or (50 if args.short else TASKS[args.task].steps)
    parser.check_multiple("steps", args.steps, Config.intervals)
    if args.refresh and args.windows == "episodes":
        parser.error("argument --refresh: whole episodes start from the zero state, which does not age")
    return args


def main() -> None:
    args = parse_args()
    task = TASKS[args.task]
    settings = whole_episodes(task) if args.windows == "episodes" else {}
    curves, timings = {}, {}
    for name in ("recurrent", "feed-forward"):
        config = Config(task=task, recurrent=name == "recurrent", steps=args.steps, refresh=args.refresh, **settings)
        returns, timings[name] = run(make_agent(config), config, args, f"{name}: ", config.rollout)
        # was [steps, seeds, rollout, num_envs]
        returns = returns.swapaxes(1, 2).reshape(-1, args.seeds, config.num_envs)
        env_steps, curves[name] = learning_curves(returns, LAST_EPISODES)
        timings[name] += f", {num_parameters(config):,} parameters"

    final = {name: curve[:, -1] for name, curve in curves.items()}
    variant = "_episodes" if args.windows == "episodes" else "_refresh" if args.refresh else ""
    what = {"_episodes": ", whole episodes", "_refresh": ", states refreshed", "": ""}[variant]
    title = f"{task.name}{what}: R2D2 and the same without memory"
    print_table(f"{title}, {env_steps[-1]:,.0f} environment steps per seed", LAST_EPISODES, final)
    apart = interval(final["recurrent"])[0] > interval(final["feed-forward"])[1]
    print(f"the intervals {'do not overlap' if apart else 'overlap'}")
    for name, timing in timings.items():
        print(f"{name}: {timing}")
    path = args.out / f"r2d2_{args.task}{variant}.png"
    ylabel = f"return, last {LAST_EPISODES} episodes"
    plot(path, title, env_steps, curves, ylabel=ylabel, goal=(task.best, "best possible"))
    save(path, final)


if __name__ == "__main__":
    main()
