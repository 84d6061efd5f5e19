"""The DQN of dqn.py on several devices and in several processes; a killed run is resumed.

pip install -e '.[examples]'
python examples/agents/multi_device.py           # four GPUs; without any, four devices of the CPU; a minute there
python examples/agents/multi_device.py --short   # half a minute at most, to see that it runs

Environments, replay items and the rows of every batch are sharded over the devices; parameters are replicated. The
agent is the same as in dqn.py, line for line. Only its buffer differs, and the sharding of its state over a mesh.
When restarted, a run goes on from its last checkpoint.

On several hosts it runs once on each, in a folder that all of them see. The environment has the number of `PROCESSES`,
the `RANK` of each from 0 on, and as `COORDINATOR` the address and a free port of the first host.
"""

import argparse
import os
import shutil
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import struct
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tqdm import tqdm

import jaxreplay as jr

DEVICES = 4  # of all processes together
CHECKPOINT, SAVE_EVERY = "multi_device", 5  # folder, and intervals
NUM_ENVS, WARMUP, STEPS, INTERVAL, LAST = 16, 100, 15_500, 310, 20  # see dqn.py
CAPACITY, BATCH, N, GAMMA, TARGET_RATE = 2**15, 128, 3, 0.99, 0.02

# Devices are chosen before anything makes an array; importing gymnax does.
RANK, PROCESSES = int(os.environ.get("RANK", 0)), int(os.environ.get("PROCESSES", 1))
jax.config.update("jax_num_cpu_devices", DEVICES // PROCESSES)
if PROCESSES > 1:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(os.environ["COORDINATOR"], PROCESSES, RANK)
import gymnax  # noqa: E402 (see above)

env, _ = gymnax.make("CartPole-v1")
hidden = [nn.Dense(128), nn.relu, nn.Dense(128), nn.relu]
network = nn.Sequential([lambda obs: obs.reshape(len(obs), -1), *hidden, nn.Dense(env.num_actions)])
optimizer = optax.adam(optax.linear_schedule(2e-3, 0.0, STEPS))
epsilon = optax.linear_schedule(1.0, 0.01, STEPS // 10)
mesh = Mesh(jax.devices()[:DEVICES], ("data",))
prioritized = jr.Prioritized(alpha=0.6, beta=optax.linear_schedule(0.4, 1.0, STEPS))
# The same calls as of the buffer inside. Items are sharded over the mesh, and so are the rows of each draw.
buffer = jr.Sharded(buffer=jr.ReplayBuffer(capacity=CAPACITY, sampler=prioritized), mesh=mesh)
tracer = jr.NStep(n=N, gamma=GAMMA, num_envs=NUM_ENVS)


@struct.dataclass
class State:
    env: Any
    obs: jax.Array  # [NUM_ENVS, ...]
    total: jax.Array  # [NUM_ENVS], return of the present episode
    tracer: jr.transitions.NStepState
    buffer: Any
    params: Any
    target_params: Any
    opt: optax.OptState
    key: jax.Array


def init(key: jax.Array) -> State:
    key, params_key, env_key = jax.random.split(key, 3)
    obs, env_state = jax.vmap(env.reset)(jax.random.split(env_key, NUM_ENVS))
    params = network.init(params_key, obs)
    zeros = jnp.zeros(NUM_ENVS, obs.dtype)
    row = obs, zeros.astype(jnp.int32), zeros, zeros > 0, zeros > 0, obs
    replay = tracer.init(*row), buffer.init(tracer.spec(*row))
    return State(env_state, obs, zeros, *replay, params, params, optimizer.init(params), key)


def act(state: State, epsilon: jax.Array | float) -> tuple[State, jax.Array]:
    """The state after one step, and the returns [NUM_ENVS] of the episodes that ended, NaN where none did."""
    key, explore_key, action_key, env_key = jax.random.split(state.key, 4)
    greedy = jnp.argmax(network.apply(state.params, state.obs), axis=-1).astype(jnp.int32)
    random = jax.random.randint(action_key, greedy.shape, 0, env.num_actions)
    action = jnp.where(jax.random.uniform(explore_key, greedy.shape) < epsilon, random, greedy)
    env_keys = jax.random.split(env_key, NUM_ENVS)
    obs, env_state, reward, terminated, truncated, info = jax.vmap(env.step)(env_keys, state.env, action)
    row = state.obs, action, reward, terminated, truncated, info["final_observation"]
    tracing, batch, _ = tracer.add(state.tracer, *row)
    replay = buffer.add(state.buffer, batch)  # each device stores the rows of its own environments
    done, total = terminated | truncated, state.total + reward
    state = state.replace(env=env_state, obs=obs, tracer=tracing, buffer=replay, key=key)
    return state.replace(total=jnp.where(done, 0.0, total)), jnp.where(done, total, jnp.nan)


def learn(state: State) -> State:
    key, sample_key = jax.random.split(state.key)
    sample = buffer.sample(state.buffer, sample_key, BATCH)  # each device draws its share of the rows
    batch, rows = sample.items, jnp.arange(BATCH)
    best = jnp.argmax(network.apply(state.params, batch.S_next), axis=-1)
    target = batch.Rn + batch.In * network.apply(state.target_params, batch.S_next)[rows, best]

    def loss_fn(params: Any) -> tuple[jax.Array, jax.Array]:
        td_errors = target - network.apply(params, batch.S)[rows, batch.A]
        return jnp.mean(sample.weights * optax.huber_loss(td_errors)), td_errors

    grads, td_errors = jax.grad(loss_fn, has_aux=True)(state.params)
    replay = buffer.update(state.buffer, sample.indices, td_errors)
    updates, opt = optimizer.update(grads, state.opt)
    params = optax.apply_updates(state.params, updates)
    target_params = optax.incremental_update(params, state.target_params, TARGET_RATE)
    return state.replace(buffer=replay, params=params, target_params=target_params, opt=opt, key=key)


def step(state: State, t: jax.Array) -> tuple[State, jax.Array]:
    state, returns = act(state, epsilon(t))
    return learn(state), returns


def layout() -> dict[str, Any]:
    """Shardings of a run's leaves, as a pytree prefix. The first axis is the seeds, except for returns."""
    axes = (), (None, "data"), (None, None, "data")
    each, envs, later = (NamedSharding(mesh, PartitionSpec(*names)) for names in axes)
    tracing = jr.transitions.NStepState(steps=later, cursor=each, count=each)
    state = State(envs, envs, envs, tracing, envs, params=each, target_params=each, opt=each, key=each)
    return {"state": state, "returns": later, "done": each}


def begin(keys: jax.Array) -> dict[str, Any]:
    """A run after the warmup: states of all seeds, returns [WARMUP + STEPS, seeds, NUM_ENVS], and intervals done."""
    act_all = jax.vmap(act, in_axes=(0, None))
    states, returns = jax.lax.scan(lambda x, _: act_all(x, 1.0), jax.vmap(init)(keys), length=WARMUP)
    returns = jnp.pad(returns, [(0, STEPS), (0, 0), (0, 0)], constant_values=jnp.nan)
    return {"state": states, "returns": returns, "done": jnp.int32(0)}


def advance(run: dict[str, Any]) -> dict[str, Any]:
    t = run["done"] * INTERVAL
    states, new = jax.lax.scan(jax.vmap(step, in_axes=(0, None)), run["state"], t + jnp.arange(INTERVAL))
    returns = jax.lax.dynamic_update_slice_in_dim(run["returns"], new, WARMUP + t, axis=0)
    return {"state": states, "returns": returns, "done": run["done"] + 1}


def main() -> np.ndarray:
    """Learning curves [seeds, intervals]."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="base seed (0)")
    parser.add_argument("--seeds", type=int, default=8, help="number of seeds (8)")
    parser.add_argument("--short", action="store_true", help="two seeds, half a minute at most; it does not learn")
    args = parser.parse_args()
    seeds, intervals = (2, 1) if args.short else (args.seeds, STEPS // INTERVAL)

    # All processes make the same calls. A checkpoint belongs to these settings, and can be restored on other devices.
    begin_all = jax.jit(lambda: begin(jax.random.split(jax.random.key(args.seed), seeds)), out_shardings=layout())
    advance_all = jax.jit(advance, donate_argnums=0, out_shardings=layout())
    settings = {"buffer": buffer, "seed": args.seed, "seeds": seeds}
    run = jr.restore(CHECKPOINT, settings, jax.eval_shape(begin_all)) if os.path.exists(CHECKPOINT) else begin_all()
    for done in tqdm(range(int(run["done"]) + 1, intervals + 1), unit=f" x {INTERVAL} steps", disable=RANK > 0):
        run = advance_all(run)
        if done % SAVE_EVERY == 0:
            jr.save(CHECKPOINT, settings, run)
    ends = [WARMUP + INTERVAL * k for k in range(1, intervals + 1)]
    of_seeds = np.swapaxes(multihost_utils.process_allgather(run["returns"], tiled=True), 0, 1)
    curves = np.array([[x[:end][~np.isnan(x[:end])][-LAST:].mean() for end in ends] for x in of_seeds])

    if RANK == 0:
        shutil.rmtree(CHECKPOINT, ignore_errors=True)
        figure, axes = plt.subplots(figsize=(5, 3.5), layout="constrained")
        axes.plot(NUM_ENVS * INTERVAL * np.arange(1, intervals + 1), curves.T, color="tab:blue", linewidth=1)
        axes.set(title=f"CartPole-v1, {DEVICES} devices", xlabel="environment steps", ylabel="return")
        figure.savefig("multi_device.png", dpi=150)
        print(f"return of the last {LAST} episodes: {curves[:, -1].mean():.0f}; by seed: {np.round(curves[:, -1])}")
    return curves


if __name__ == "__main__":
    main()
