"""rejax's DQN, original and ported: CartPole-v1 with the settings of rejax's repository, but half of the steps.

pip install -e . rejax==0.1.3 gymnax==0.0.9
python examples/ports/rejax_dqn.py           # 8 seeds, five minutes on two CPU cores
python examples/ports/rejax_dqn.py --speed   # time of short runs, with buffers of several sizes
python examples/ports/rejax_dqn.py --check   # checks of both versions against correct values
python examples/ports/rejax_dqn.py --short   # a minute, mostly compilation

Tested with jax 0.10.2. There are two ports. `OnReplayBuffer` only replaces the buffer, in any off-policy algorithm of
rejax. `PrioritizedDQN` learns from prioritized 3-step transitions, and bootstraps at a time limit.
"""

import collections
from typing import Any

import jax
import jax.numpy as jnp
import measure
import rejax_checks
from flax import struct
from rejax import DQN
from rejax.algos.algorithm import register_init
from rejax.buffers import ReplayBuffer
from rejax_adapter import Ended, KeepsEnds, OnReplayBuffer, Replay, run

import jaxreplay as jr

TASK = "CartPole-v1"
AGENT = {"agent": "DuelingQNetwork", "learning_rate": 0.001, "max_grad_norm": 10, "exploration_fraction": 0.5}
SIZES = {"num_envs": 10, "buffer_size": 50_000, "fill_buffer": 5_000, "batch_size": 100}
UPDATES = {"num_epochs": 5, "polyak": 0.98}
STEPS = {"total_timesteps": 50_000, "eval_freq": 2_500, "skip_initial_evaluation": True}  # half of rejax's steps
SETTINGS = {**AGENT, **SIZES, **UPDATES, **STEPS}


class PortedDQN(OnReplayBuffer, DQN):
    """The same agent on another buffer."""


Batch = collections.namedtuple("Batch", "obs action reward next_obs discount weight handle")


class TracedReplay(Replay):
    """Stores n-step transitions of the added steps."""

    tracer: jr.NStep = struct.field(pytree_node=False)
    tracing: jr.transitions.NStepState

    def extend(self, step: tuple) -> "TracedReplay":
        tracing, batch, _ = self.tracer.add(self.tracing, *step)
        return self.replace(tracing=tracing, state=self.buffer.add(self.state, batch))

    def sample(self, num: int, rng: jax.Array) -> Batch:
        found = super().sample(num, rng)
        return Batch(found.S, found.A, found.Rn, found.S_next, found.In, found.W, found.idx)


class PrioritizedDQN(DQN):
    """DQN on prioritized n-step transitions; its environment is wrapped in `KeepsEnds`."""

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


PRIORITIZED = measure.count_lines(Replay, Ended, KeepsEnds, TracedReplay, PrioritizedDQN)
PORTS = {
    "buffer only": (PortedDQN, measure.count_lines(Replay, OnReplayBuffer, PortedDQN)),
    "3-step, prioritized, truncation": (PrioritizedDQN, PRIORITIZED),
}


def check() -> dict[str, list[str]]:
    return {**rejax_checks.time_limits(DQN, PrioritizedDQN, 1.0), **rejax_checks.values(DQN, PrioritizedDQN)}


if __name__ == "__main__":
    few = {"total_timesteps": 2_500, "fill_buffer": 500}
    run("DQN", DQN, PORTS, TASK, SETTINGS, short=few, check=check)
