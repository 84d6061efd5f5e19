"""Adapters of Stoix's Rainbow, for `stoix_rainbow.py`: replays with the methods of flashbax's prioritised buffer."""

from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from stoa.core_wrappers.wrapper import Wrapper

import jaxreplay as jr

TERMINATED = "terminated"


class Drawn(NamedTuple):
    """A batch as Stoix's learner takes it."""

    experience: Any  # [B, T, ...]
    indices: jax.Array  # [B]
    probabilities: jax.Array  # [B]


class Sequences:
    """Prioritized sequences; Stoix sums their rewards."""

    def __init__(
        self,
        max_size: int,
        sample_batch_size: int,
        add_batch_size: int,
        sample_sequence_length: int,
        priority_exponent: float,
        **others: Any,
    ):
        sizes = {"length": max_size // add_batch_size, "num_envs": add_batch_size}
        self.sampler, self.batch_size = jr.Prioritized(alpha=priority_exponent), sample_batch_size
        self.buffer = jr.SequenceBuffer(**sizes, sequence_length=sample_sequence_length, sampler=self.sampler)

    def init(self, row: Any) -> Any:
        return self.buffer.init(
            jax.tree.map(lambda x: jnp.tile(jnp.asarray(x), (1, self.buffer.num_envs, *[1] * jnp.ndim(x))), row)
        )

    def add(self, state: Any, rows: Any) -> Any:
        return self.buffer.add(state, jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), rows))

    def sample(self, state: Any, key: jax.Array) -> Drawn:
        found = self.buffer.sample(state, key, self.batch_size)
        return Drawn(found.items, found.indices, found.probabilities)

    def set_priorities(self, state: Any, indices: jax.Array, priorities: jax.Array) -> Any:
        return self.buffer.update(state, indices, priorities)


class KeepsTermination(Wrapper):
    """Adds to the episode's metrics, which Stoix stores, whether an end is a termination."""

    def reset(self, *args: Any) -> tuple[Any, Any]:
        return self._with(*self._env.reset(*args))

    def step(self, *args: Any) -> tuple[Any, Any]:
        return self._with(*self._env.step(*args))

    def _with(self, state: Any, timestep: Any) -> tuple[Any, Any]:
        metrics = {**timestep.extras["episode_metrics"], TERMINATED: timestep.terminated()}
        return state, timestep.replace(extras={**timestep.extras, "episode_metrics": metrics})


class Traced(Sequences):
    """Stores prioritized n-step transitions; the environment is wrapped in `KeepsTermination`."""

    def __init__(self, module: ModuleType, gamma: float, max_size: int, **settings: Any):
        super().__init__(max_size=max_size, **settings)
        self.module, self.num_envs = module, settings["add_batch_size"]
        self.tracer = jr.NStep(n=settings["sample_sequence_length"], gamma=gamma, num_envs=self.num_envs)
        self.buffer = jr.ReplayBuffer(capacity=max_size, sampler=self.sampler, axes=2)

    def init(self, row: Any) -> Any:
        row = row._replace(info={TERMINATED: False})
        rows = jax.tree.map(lambda x: jnp.zeros((self.num_envs, 1, *jnp.shape(x)), jnp.result_type(x)), row)
        steps = self.steps(rows)
        tracing = self.tracer.init(*jax.tree.map(lambda x: x[0], steps))
        return tracing, self.buffer.init(jax.eval_shape(self.trace, tracing, steps)[1])

    def steps(self, rows: Any) -> tuple:
        terminated = rows.info[TERMINATED]
        steps = rows.obs, rows.action, rows.reward, terminated, rows.done & ~terminated, rows.next_obs
        return jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), steps)

    def trace(
        self, tracing: jr.transitions.NStepState, steps: tuple
    ) -> tuple[jr.transitions.NStepState, jr.TransitionBatch]:
        return jax.lax.scan(lambda tracing, step: self.tracer.add(tracing, *step)[:2], tracing, steps)

    def add(self, state: Any, rows: Any) -> Any:
        tracing, batch = self.trace(state[0], self.steps(rows))
        return tracing, self.buffer.add(state[1], batch)

    def sample(self, state: Any, key: jax.Array) -> Drawn:
        found = self.buffer.sample(state[1], key, self.batch_size)
        self.discount, batch = found.items.In, found.items  # for `loss`, in the same trace
        row = self.module.Transition(batch.S, batch.A, batch.Rn, batch.In == 0, batch.S_next, {})
        return Drawn(jax.tree.map(lambda x: x[:, None], row), found.indices, found.probabilities)

    def set_priorities(self, state: Any, indices: jax.Array, priorities: jax.Array) -> Any:
        return state[0], super().set_priorities(state[1], indices, priorities)

    def loss(self, logits: Any, atoms: Any, action: Any, reward: Any, discount: Any, *others: Any) -> jax.Array:
        """Stoix's loss, with the discount of each transition: gamma^m, or 0 after a termination."""
        return self.module.original_loss(logits, atoms, action, reward, self.discount, *others)
