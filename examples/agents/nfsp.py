"""An average policy learned from a memory of a whole run: fictitious self-play of Kuhn poker.

pip install -e '.[examples]'
python examples/agents/nfsp.py           # 16 seeds, ten seconds on two CPU cores; draws nfsp.png
python examples/agents/nfsp.py --short   # half a minute at most, to see that it runs

Neural fictitious self-play (Heinrich and Silver 2016, arXiv:1603.01121, section 3) with tables instead of networks.
Each player learns a best response by Q-learning from a ring of recent transitions. From a second memory, which holds
its own best-response actions, it learns the average of all its best responses so far. It plays the average, and now and
then its best response. In a zero-sum game the averages approach an equilibrium. The distance is the exploitability: the
amount that a best response would win from them per hand, mean of both players. Here it is computed exactly.

`MEMORY` is the second memory:

- reservoir: `jr.ReservoirBuffer`, a uniform sample of all best responses (Vitter 1985, algorithm R).
- ring: `jr.ReplayBuffer` of the same capacity: the newest best responses.
- ring of all: `jr.ReplayBuffer` with room for all best responses, however long the run.

A run makes about 150,000 best responses, and both limited memories hold 4,096. After 640,000 hands the exploitability
is 0.016 [0.014, 0.018] with the reservoir and 0.222 [0.192, 0.253] with the ring, whose average cycles. If all actions
are equally likely it is 0.458. With the ring of all it is 0.015 [0.013, 0.017]: this remainder shrinks with the step
sizes.
"""

import argparse
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from flax import struct

import jaxreplay as jr

MEMORY = "reservoir"
STEPS, INTERVAL = 20_000, 100  # the exploitability is computed after each interval
HANDS = 32  # played at a time
BATCH = 128
CAPACITY = 2**12  # second memory
RECENT = 2**12  # ring of transitions
ANTICIPATION = 0.1  # probability of the best response instead of the average policy, in a hand
EXPLORATION = 0.06  # first epsilon of the best response; falls with the square root of the number of steps
STEP_SIZE = 0.005  # for the values and the average policy
PASS, BET = 0, 1
# Cards 0, 1, 2. Information sets: 0 to 2 by the first player's card; 3 to 5 likewise, after pass and bet; 6 to 8 by the
# second player's card, after pass; 9 to 11 likewise, after bet.
SETS = 12
MEMORIES = {
    "reservoir": jr.ReservoirBuffer(capacity=CAPACITY),
    "ring": jr.ReplayBuffer(capacity=CAPACITY),
    "ring of all": jr.ReplayBuffer(capacity=HANDS * STEPS // 2),  # 0.23 per hand on average
}
memory = MEMORIES[MEMORY]
ring = jr.ReplayBuffer(capacity=RECENT)
DEALS = np.array([(a, b) for a in range(3) for b in range(3) if a != b], np.int32)
CHOICES = [*itertools.product((PASS, BET), repeat=3)]
PLAYS = np.array([(*deal, *actions) for deal in DEALS for actions in CHOICES])  # cards and actions of all hands
PURE = np.eye(2)[[x + y for x in CHOICES for y in CHOICES]]  # [64, 6, 2], the pure policies of a player


@struct.dataclass
class Players:
    values: jax.Array  # [SETS, 2], of the actions, for the best responses
    logits: jax.Array  # [SETS, 2], of the average policies
    recent: Any  # memory of decisions
    best: Any  # memory of (where, action)


def payoff(cards: Any, first: Any, second: Any, third: Any) -> jax.Array:
    """The first player's win for `cards` [..., 2]. The third action counts only after pass and bet."""
    sign = jnp.where(cards[..., 0] > cards[..., 1], 1.0, -1.0)
    after_pass = jnp.where(second == PASS, sign, jnp.where(third == PASS, -1.0, 2 * sign))
    return jnp.where(first == PASS, after_pass, jnp.where(second == PASS, 1.0, 2 * sign))


def play(policies: jax.Array, luck: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
    """One hand from `policies` [SETS, 2] and uniform `luck` [4]: decisions [3], and a mask of those that were made.

    The information set after `where` is `then`, unless discount is 0.
    """
    cards = jnp.asarray(DEALS)[(luck[0] * len(DEALS)).astype(jnp.int32)]

    def act(where: jax.Array, luck: jax.Array) -> jax.Array:
        return (luck < policies[where, BET]).astype(jnp.int32)

    first = act(cards[0], luck[1])
    answer = 6 + 3 * first + cards[1]
    second = act(answer, luck[2])
    third = act(3 + cards[0], luck[3])
    goes_on = (first == PASS) & (second == BET)
    won = payoff(cards, first, second, third)
    decisions = {"where": jnp.stack([cards[0], answer, 3 + cards[0]]), "action": jnp.stack([first, second, third])}
    decisions["reward"] = jnp.stack([jnp.where(goes_on, 0.0, won), -won, won])
    decisions["then"] = jnp.full(3, 3 + cards[0])
    decisions["discount"] = jnp.stack([goes_on, False, False]).astype(jnp.float32)
    return decisions, jnp.stack([True, True, goes_on])


def win(policies: jax.Array) -> jax.Array:
    """The mean that the first player wins per hand."""
    a, b, first, second, third = PLAYS.T
    chances = policies[a, first] * policies[6 + 3 * first + b, second] * policies[3 + a, third]
    return jnp.sum(chances * payoff(PLAYS[:, :2], first, second, third)) / len(DEALS)


def exploitability(policies: jax.Array) -> jax.Array:
    """The win per hand of best responses to `policies` [SETS, 2], mean of both players: the best of all pure ones."""
    firsts = jax.vmap(lambda pure: win(policies.at[:6].set(pure)))(PURE)
    seconds = jax.vmap(lambda pure: win(policies.at[6:].set(pure)))(PURE)
    return (firsts.max() - seconds.min()) / 2


def play_hands(players: Players, exploration: jax.Array, key: jax.Array) -> tuple[dict, jax.Array, jax.Array]:
    """Decisions of HANDS hands [HANDS * 3], a mask of those made, and a mask of the best responses among these."""
    mode_key, play_key = jax.random.split(key)
    greedy = jax.nn.one_hot(players.values.argmax(axis=1), 2)
    best = (1 - exploration) * greedy + exploration / 2
    is_best = jax.random.bernoulli(mode_key, ANTICIPATION, (HANDS, 2))  # for each player
    by_set = jnp.repeat(is_best, SETS // 2, axis=1)[..., None]
    policies = jnp.where(by_set, best, jax.nn.softmax(players.logits))
    decisions, there_are = jax.vmap(play)(policies, jax.random.uniform(play_key, (HANDS, 4)))
    responses = there_are & is_best[:, [0, 1, 0]]
    return jax.tree.map(lambda x: x.reshape(-1), (decisions, there_are, responses))


def learn(players: Players, recent: dict[str, jax.Array], best: jr.Sample) -> Players:
    """One update from draws of both memories: Q-learning, and the likelihood of the best responses."""
    target = recent["reward"] + recent["discount"] * players.values[recent["then"]].max(axis=1)
    error = target - players.values[recent["where"], recent["action"]]
    where, action = best.items
    slope = jax.nn.one_hot(action, 2) - jax.nn.softmax(players.logits)[where]  # gradient of the log-likelihood
    values = players.values.at[recent["where"], recent["action"]].add(STEP_SIZE * error)
    logits = players.logits.at[where].add(STEP_SIZE * best.weights[:, None] * slope)  # 0 if the memory is empty
    return players.replace(values=values, logits=logits)


def init(key: jax.Array) -> Players:
    table = jnp.zeros((SETS, 2))
    players = Players(values=table, logits=table, recent=None, best=None)
    rows, *_ = jax.eval_shape(play_hands, players, jnp.zeros(()), key)
    return players.replace(recent=ring.init(rows), best=memory.init((rows["where"], rows["action"])))


def step(exploration: jax.Array, players: Players, key: jax.Array) -> Players:
    play_key, add_key, recent_key, best_key = jax.random.split(key, 4)
    rows, there_are, responses = play_hands(players, exploration, play_key)
    # Each memory stores a part of the same rows: the mask says which.
    recent = ring.add(players.recent, rows, mask=there_are)
    # A reservoir draws which of its items to overwrite, so `add` takes a key.
    keys = (add_key,) if MEMORY == "reservoir" else ()
    best = memory.add(players.best, (rows["where"], rows["action"]), *keys, mask=responses)
    players = players.replace(recent=recent, best=best)
    drawn = ring.sample(recent, recent_key, BATCH).items
    return learn(players, drawn, memory.sample(best, best_key, BATCH))


def train(key: jax.Array, intervals: int) -> jax.Array:
    """The exploitability after each interval."""

    def interval(players: Players, number: jax.Array) -> tuple[Players, jax.Array]:
        keys = jax.random.split(jax.random.fold_in(key, number), INTERVAL)
        exploration = EXPLORATION / jnp.sqrt(1.0 + number)
        players, _ = jax.lax.scan(lambda players, key: (step(exploration, players, key), None), players, keys)
        return players, exploitability(jax.nn.softmax(players.logits))

    return jax.lax.scan(interval, init(key), jnp.arange(intervals))[1]


def main() -> np.ndarray:
    """Exploitability [seeds, intervals]."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="base seed (0)")
    parser.add_argument("--seeds", type=int, default=16, help="number of seeds (16)")
    parser.add_argument("--short", action="store_true", help="two seeds, half a minute at most")
    args = parser.parse_args()
    seeds, steps = (2, 4 * INTERVAL) if args.short else (args.seeds, STEPS)

    keys = jax.random.split(jax.random.key(args.seed), seeds)
    curves = np.asarray(jax.jit(jax.vmap(lambda key: train(key, steps // INTERVAL)))(keys))

    figure, axes = plt.subplots(figsize=(5, 3.5), layout="constrained")
    axes.plot(INTERVAL * np.arange(1, curves.shape[1] + 1), curves.T, linewidth=1)
    axes.set(title=f"Kuhn poker, {MEMORY}", xlabel=f"steps of {HANDS} hands", ylabel="exploitability", yscale="log")
    figure.savefig("nfsp.png", dpi=150)
    print(f"exploitability: {curves[:, -1].mean():.3f}; by seed: {np.round(curves[:, -1], 3)}")
    return curves


if __name__ == "__main__":
    main()
