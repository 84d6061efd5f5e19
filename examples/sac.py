"""Soft Actor-Critic on Pendulum-v1, several seeds at once, with uniform or prioritized replay.

pip install -e '.[examples]'
python examples/sac.py           # uniform replay, 8 seeds
python examples/sac.py --per     # prioritized replay
python examples/sac.py --short   # a few seconds, to see that it runs
"""

import argparse
from typing import Any

import gymnax
import jax
from arguments import Parser, integer
from soft_actor_critic import Config, Environment, make_agent
from training import Progress, make_train, run, summarize

LAST_EPISODES = 40  # a seed's return is the mean over so many training episodes
SOLVED = -200


def pendulum() -> Environment:
    env, params = gymnax.make("Pendulum-v1")

    def reset(key: jax.Array) -> tuple[Any, jax.Array]:
        obs, state = env.reset(key, params)
        return state, obs

    def step(key: jax.Array, state: Any, action: jax.Array) -> tuple:
        torque = params.max_torque * action
        obs, state, reward, terminated, truncated, info = env.step(key, state, torque, params)
        return state, obs, reward, terminated, truncated, info["final_observation"]

    return Environment(reset=reset, step=step, action_size=env.num_actions)


def parse_args() -> tuple[argparse.Namespace, Config]:
    parser = Parser("Soft Actor-Critic on Pendulum-v1, seeds in one jitted scan.")
    parser.add_experiment(seeds=8)
    parser.add_count("steps", "environment steps per seed", 40_000, 4_000)
    parser.add_argument("--per", action="store_true", help="prioritized replay (default: uniform)")
    parser.add_argument("--n", type=integer(1, 100), default=Config.n, help=f"steps in a return ({Config.n})")
    args = parser.parse()
    steps = parser.learning_steps(args.steps, Config.num_envs, Config)
    return args, Config(steps=steps, use_per=args.per, n=args.n)


def main() -> None:
    args, config = parse_args()
    keys = jax.random.split(jax.random.key(args.seed), args.seeds)
    name = "prioritized" if args.per else "uniform"
    progress = Progress(config.steps * config.num_envs * args.seeds)
    returns, timing = run(make_train(make_agent(config, pendulum()), config, progress), keys, progress)

    path, title = args.out / f"sac_{name}.png", f"Pendulum-v1, Soft Actor-Critic, {name} replay"
    summarize(path, title, name, returns, timing, last_episodes=LAST_EPISODES, goal=SOLVED)


if __name__ == "__main__":
    main()
