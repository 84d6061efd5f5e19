"""(h) Difficulty pools: draw B tasks, learn the rewards of their groups, move tasks and draw again."""

import random
from collections import deque

import jax
import jax.numpy as jnp
import numpy as np
from harness import LoopProgram, ScanProgram
from jax_buffers import many
from settings import Setting

import jaxreplay as jr

ROLLOUTS = 8
EASY, HARD, MAX_EASY, MAX_HARD = 0.9, 0.1, 0.5, 0.4


def jaxreplay_pools(setting: Setting) -> ScanProgram:
    pools = jr.DifficultyPools(
        tasks_per_env=(setting.capacity // 2, setting.capacity - setting.capacity // 2),
        easy_threshold=EASY,
        hard_threshold=HARD,
        max_easy_pool_fraction=MAX_EASY,
        max_hard_pool_fraction=MAX_HARD,
    )

    def step(carry, key):
        state, _ = carry
        tasks, _ = pools.sample(state, key, setting.batch_size)
        rewards = (tasks % 3).astype(jnp.float32) / 2  # a third is never solved, a third always
        return pools.update(state, tasks, jnp.broadcast_to(rewards[:, None], (setting.batch_size, ROLLOUTS)))

    def steps(carry, key):
        return jax.vmap(step)(carry, jax.random.split(key, setting.seeds))

    carry = many((pools.init(), jnp.zeros(setting.batch_size, bool)), setting)
    return ScanProgram(step if setting.seeds == 1 else steps, jax.tree.map(jnp.copy, carry))


def python_pools(setting: Setting) -> LoopProgram:
    """Dicts and queues in Python; a draw makes a tuple of the pool, as in prime-rl."""
    half = setting.capacity // 2
    ranges = [range(half), range(half, setting.capacity)]
    normal = [dict.fromkeys(tasks) for tasks in ranges]
    parked = [(deque(), deque()) for _ in ranges]
    caps = [(int(len(tasks) * MAX_EASY), int(len(tasks) * MAX_HARD)) for tasks in ranges]

    def draw():
        (env,) = random.choices((0, 1), weights=[len(tasks) for tasks in ranges])
        return random.choice(tuple(normal[env]))

    def update(task, rewards):
        env, mean = int(task >= half), rewards.mean()
        if task not in normal[env] or HARD < mean < EASY:
            return
        pool = int(mean <= HARD)
        del normal[env][task]
        parked[env][pool].append(task)
        if len(parked[env][pool]) > caps[env][pool]:
            normal[env][parked[env][pool].popleft()] = None

    def step():
        tasks = [draw() for _ in range(setting.batch_size)]
        for task in tasks:
            update(task, np.full(ROLLOUTS, task % 3 / 2))

    return LoopProgram(step)
