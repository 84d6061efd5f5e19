"""rejax's DQN, as it is and on jaxreplay: CartPole-v1 with the settings that rejax's repository gives for it.

pip install -e . rejax==0.1.3 gymnax==0.0.9
python examples/ports/rejax_dqn.py           # 8 seeds, half an hour on two CPU cores
python examples/ports/rejax_dqn.py --check   # what is right now that was not
python examples/ports/rejax_dqn.py --short   # a minute, most of it to compile

Runs with jax 0.10.2. There are two ports. `OnReplayBuffer` changes the buffer and nothing else, of every off-policy
algorithm of rejax. `PrioritizedDQN` learns from prioritized 3-step transitions, and to it a time limit is no
termination.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import measure
from flax import struct
from rejax import DQN
from rejax.algos.algorithm import register_init
from rejax.buffers import ReplayBuffer
from rejax_adapter import PACKAGES, Ended, KeepsEnds, OnReplayBuffer, Replay, trainer

import jaxreplay as jr

TASK = "CartPole-v1"
LAST = 4  # a seed's return is the mean of so many evaluations
SETTINGS = {
    "agent": "DuelingQNetwork",
    "num_envs": 10,
    "buffer_size": 50_000,
    "fill_buffer": 5_000,
    "batch_size": 100,
    "max_grad_norm": 10,
    "learning_rate": 0.001,
    "num_epochs": 5,
    "total_timesteps": 50_000,  # half of those
    "eval_freq": 2_500,
    "polyak": 0.98,
    "exploration_fraction": 0.5,
    "skip_initial_evaluation": True,
}


class PortedDQN(OnReplayBuffer, DQN):
    """The same agent on another buffer."""


class Batch(NamedTuple):
    obs: jax.Array
    action: jax.Array
    reward: jax.Array
    next_obs: jax.Array
    discount: jax.Array
    weight: jax.Array
    handle: jax.Array


class TracedReplay(Replay):
    """Stores the n-step transitions of the steps that it is given."""

    tracer: jr.NStep = struct.field(pytree_node=False)
    tracing: jr.NStepState

    def extend(self, step: tuple) -> "TracedReplay":
        tracing, batch, valid = self.tracer.add(self.tracing, *step)
        return self.replace(tracing=tracing, state=self.buffer.add(self.state, batch, mask=valid))

    def sample(self, num: int, rng: jax.Array) -> Batch:
        found = super().sample(num, rng)
        return Batch(found.S, found.A, found.Rn, found.S_next, found.In, found.W, found.idx)


class PrioritizedDQN(DQN):
    """DQN on prioritized n-step transitions; its environment is in `KeepsEnds`."""

    n: int = struct.field(pytree_node=False, default=3)

    @register_init
    def initialize_replay_buffer(self, rng: jax.Array) -> dict[str, Any]:
        tracer = jr.NStep(n=self.n, gamma=self.gamma, num_envs=self.num_envs)
        buffer = jr.ReplayBuffer(capacity=self.buffer_size, sampler=jr.Prioritized())
        like = jax.eval_shape(lambda: ReplayBuffer.empty(self.num_envs, self.obs_space, self.action_space)).data
        step = like.obs, like.action, like.reward, like.done, like.done, like.next_obs
        return {"replay_buffer": TracedReplay(buffer, buffer.init(tracer.spec(*step)), tracer, tracer.init(*step))}

    def collect_transitions(self, ts: Any, *args: Any, **kwargs: Any) -> tuple[Any, tuple]:
        ts, step = super().collect_transitions(ts, *args, **kwargs)
        end = ts.env_state
        return ts, (step.obs, step.action, step.reward, end.terminated, end.truncated, end.obs)

    def update(self, ts: Any, batch: Batch) -> Any:
        best = jnp.argmax(self.agent.apply(ts.q_ts.params, batch.next_obs), axis=1)
        values = self.agent.apply(ts.q_target_params, batch.next_obs, best, method="take")
        reward = self.normalize_rew(ts.rew_rms_state, batch.reward) if self.normalize_rewards else batch.reward

        def loss(params: Any) -> tuple[jax.Array, jax.Array]:
            taken = self.agent.apply(params, batch.obs, batch.action, method="take")
            td_errors = reward + batch.discount * values - taken
            return jnp.mean(batch.weight * td_errors**2) / 2, td_errors

        grads, td_errors = jax.grad(loss, has_aux=True)(ts.q_ts.params)
        replay = ts.replay_buffer
        replay = replay.replace(state=replay.buffer.update(replay.state, batch.handle, td_errors))
        return ts.replace(q_ts=ts.q_ts.apply_gradients(grads=grads), replay_buffer=replay)


LINES = {
    "buffer only": measure.count_lines(Replay, OnReplayBuffer, PortedDQN),
    "3-step, prioritized, truncation": measure.count_lines(
        Replay, Ended, KeepsEnds, Batch, TracedReplay, PrioritizedDQN
    ),
}


def trainers(**settings: Any) -> list[Any]:
    """The original, and the ports by name."""
    settings = {**SETTINGS, **settings}
    ports = [trainer(PortedDQN, TASK, LAST, **settings), trainer(PrioritizedDQN, TASK, LAST, True, **settings)]
    return [trainer(DQN, TASK, LAST, **settings), dict(zip(LINES, ports, strict=True))]


def rows(task: str, *args: Any, **how: Any) -> list[dict[str, Any]]:
    found = [
        {"port": port, "task": task, "lines": LINES[port], **row}
        for port, row in measure.compare_all(*args, **how).items()
    ]
    for row in found:
        measure.show(row)
    return found


def main() -> None:
    args = measure.parser("rejax's DQN, as it is and on jaxreplay.").parse()
    keys = jax.random.split(jax.random.key(args.seed), args.seeds)
    if args.speed:
        found = []
        for capacity in (50_000,) if args.short else (50_000, 131_072, 1_000_000):
            short = trainers(buffer_size=capacity, total_timesteps=2_500, fill_buffer=500)
            found += rows(f"{TASK}, {capacity:,} items, 2,500 steps", *short, keys[:1], rounds=5, returns=False)
        measure.write(args.out, "rejax_dqn_speed", PACKAGES, agent="rejax DQN", rows=found)
        return
    steps = {"total_timesteps": 2_500, "fill_buffer": 500} if args.short else {}
    found = rows(TASK, *trainers(**steps), keys, rounds=1)
    measure.write(args.out, "rejax_dqn", PACKAGES, agent="rejax DQN", rows=found)


if __name__ == "__main__":
    main()
