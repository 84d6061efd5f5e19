"""How often should a learner reuse groups of rollouts? Staleness against the cost of generation.

Once, with the best step size; only where generation is very expensive do two uses gain a little.

pip install -e '.[examples]'
python examples/studies/staleness.py           # groups up to 31 policies old, for four costs of generation
python examples/studies/staleness.py --short   # half a minute at most, to see that it runs

A group is 8 rollouts of a task, and an update of the policy learns from the newest 64 groups. To generate 64 groups
costs c times as much as an update. The first policy generates 64 groups, and with reuse k each later one 64 / k. So a
group is used k times and is up to k - 1 policies old, and an update costs 1 + c / k. Arnal et al. 2026, Efficient RL
Training for LLMs with Experience Replay (arXiv:2604.08706), study this trade-off for language models.

A task is a random vector x, and its answer is the largest of 16 linear functions of x. The policy is softmax-linear in
x, and a rollout is one token, with reward 1 if it is the answer. The loss is GRPO's: advantages normalized within the
group, and clipped ratios to the policy that made it (Shao et al. 2024, DeepSeekMath, section 4.1). Adam runs with four
step sizes, so that the policy moves less or more in k updates. A gain is with the best of them for each k.

Replay pays here for small steps only: with step size 0.01, eight uses reach 0.633 [0.627, 0.639], and one 0.418 [0.413,
0.424]. With the best step size for each k, fresh groups win up to c = 4, and at c = 16 two uses are better by 0.012
[0.002, 0.022]. The best k and step size are chosen on the same seeds, so small gains are optimistic. Trials with
batches of 32 groups, and with budgets of 100 to 800, gave the same picture.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from experiment import Parser, plot, report

import jaxreplay as jr

GROUPS, ROLLOUTS, FEATURES, TOKENS = 64, 8, 16, 16
REUSES, COSTS = (1, 2, 4, 8, 16, 32), (0, 1, 4, 16)
RATES = (0.01, 0.03, 0.1, 0.3)
SETTINGS = (*(f"step size {rate:g}" for rate in RATES), "the best step size for each number of uses")
TESTS, CLIP = 256, 0.2
BUFFER = jr.ReplayBuffer(capacity=GROUPS, sampler=jr.Uniform(replacement=False))
OPTIMIZER = optax.scale_by_adam()  # times the step size


def find_answers(teacher: jax.Array, tasks: jax.Array) -> jax.Array:
    """Answers of tasks [..., FEATURES]."""
    return jnp.argmax(tasks @ teacher, axis=-1)


def roll_out(policy: jax.Array, teacher: jax.Array, key: jax.Array) -> dict[str, jax.Array]:
    """Groups of rollouts, [GROUPS, ...] each."""
    task_key, token_key = jax.random.split(key)
    tasks = jax.random.normal(task_key, (GROUPS, FEATURES))
    logp = jax.nn.log_softmax(tasks @ policy)
    tokens = jax.random.categorical(token_key, logp[:, None], shape=(GROUPS, ROLLOUTS))
    rewards = (tokens == find_answers(teacher, tasks)[:, None]).astype(jnp.float32)
    made = {"task": tasks, "tokens": tokens, "rewards": rewards}
    return made | {"logp": jnp.take_along_axis(logp, tokens, axis=1)}


def loss(policy: jax.Array, items: dict[str, jax.Array]) -> jax.Array:
    """Clipped surrogate."""
    rewards = items["rewards"]
    advantages = rewards - rewards.mean(axis=1, keepdims=True)
    advantages /= rewards.std(axis=1, keepdims=True) + 1e-6
    logp = jnp.take_along_axis(jax.nn.log_softmax(items["task"] @ policy), items["tokens"], axis=1)
    ratios = jnp.exp(logp - items["logp"])
    surrogate = jnp.minimum(ratios * advantages, jnp.clip(ratios, 1 - CLIP, 1 + CLIP) * advantages)
    return -surrogate.mean()


def train(reuse: jax.Array, rate: jax.Array, key: jax.Array, updates: int) -> jax.Array:
    """Expected reward of the policy after each update of one seed, mean over test tasks."""
    teacher_key, test_key, key = jax.random.split(key, 3)
    teacher = jax.random.normal(teacher_key, (FEATURES, TOKENS))
    tests = jax.random.normal(test_key, (TESTS, FEATURES))
    answers = find_answers(teacher, tests)

    def update(carry: tuple, version: jax.Array) -> tuple[tuple, jax.Array]:
        policy, opt, replay, key = carry
        key, generate_key, draw_key = jax.random.split(key, 3)
        groups = roll_out(policy, teacher, generate_key)
        new = (jnp.arange(GROUPS) < GROUPS // reuse) | (version == 0)
        replay = BUFFER.add(replay, groups, mask=new)  # its capacity is the newest GROUPS
        sample = BUFFER.sample(replay, draw_key, GROUPS)
        steps, opt = OPTIMIZER.update(jax.grad(loss)(policy, sample.items), opt)
        policy = policy - rate * steps
        reward = jnp.mean(jax.nn.softmax(tests @ policy)[jnp.arange(TESTS), answers])
        return (policy, opt, replay, key), reward

    policy = jnp.zeros((FEATURES, TOKENS))
    replay = BUFFER.init(jax.eval_shape(roll_out, policy, teacher, key))
    return jax.lax.scan(update, (policy, OPTIMIZER.init(policy), replay, key), jnp.arange(updates, dtype=jnp.int32))[1]


def updates_within(budget: float, cost: float, reuse: int) -> int:
    """Number of updates that a budget pays for, in costs of an update; the first batch is generated whole."""
    return max(1, int((budget - cost + cost / reuse) / (1 + cost / reuse)))


def rewards_at(log: np.ndarray, budget: float, cost: float) -> np.ndarray:
    """Rewards [reuses, rates + 1, seeds] within a budget.

    The last step size is the best one of each reuse, by its mean over the seeds.
    """
    rewards = np.stack([log[i, :, :, updates_within(budget, cost, k) - 1] for i, k in enumerate(REUSES)])
    best = rewards.mean(axis=2).argmax(axis=1)
    return np.concatenate([rewards, rewards[np.arange(len(REUSES)), best][:, None]], axis=1)


def figures_of(log: np.ndarray, budget: int) -> dict[str, np.ndarray]:
    """Rewards at cost 4 by reuse and step size; at each cost, the gain of the best reuse over 1 with the best step."""
    figures = {}
    for reuse, rewards in zip(REUSES, rewards_at(log, budget, 4), strict=True):
        figures |= {f"{reuse}, {name}": x for name, x in zip(SETTINGS[:-1], rewards, strict=False)}
    for cost in COSTS:
        rewards = rewards_at(log, budget, cost)[:, -1]
        figures[f"gain at c = {cost}"] = rewards[rewards.mean(axis=1).argmax()] - rewards[0]
    return figures


def main() -> None:
    args = Parser("Reuse of rollouts against the cost of generation.", seeds=16).parse()
    budget = 60 if args.short else 500  # units of compute; a unit is one update
    run = jax.vmap(lambda *x: train(*x, budget), in_axes=(None, None, 0))
    run = jax.vmap(jax.vmap(run, in_axes=(None, 0, None)), in_axes=(0, None, None))
    log = np.asarray(jax.jit(run)(jnp.array(REUSES), jnp.array(RATES), args.keys))
    path = args.out / "staleness.png"
    rewards = {f"cost: {cost} updates": rewards_at(log, budget, cost).T for cost in COSTS}  # [seeds, rates, reuses]
    panels = {name: {label: x[:, i] for label, x in rewards.items()} for i, name in enumerate(SETTINGS) if i in (0, 4)}
    about = "Is it worth to learn several times from a group of rollouts?\ncost: of 64 new groups"
    y = f"reward (1 is best) after compute worth {budget} updates"
    plot(path, about, panels, ("uses of each group", [*map(str, REUSES)]), y)
    title = f"expected reward after {budget} units of compute; generation costs 4; by uses of a group, and step size"
    report(path, title, figures_of(log, budget), 3)


if __name__ == "__main__":
    main()
