"""Does the saved replay of an earlier experiment help a later one? (Replay across experiments.)

Yes, where the first experiment found the reward: over training the second one's return is higher by 32 [19, 43].

pip install -e '.[examples]'
python examples/studies/rae.py           # a first experiment, and a second one with its replay and without
python examples/studies/rae.py --short   # half a minute at most, to see that it runs
python examples/studies/rae.py --hold 2 --steps 6000   # a harder task

The agent and the car on a hill of `rlpd.py`, where each action lasts for 3 steps of the car, so that random
actions sometimes reach the top. The first experiment saves its replay. The second starts from new parameters and an
empty buffer of its own, and draws half of each batch from either (Tirumala et al. 2023, Replay across Experiments,
arXiv:2311.15951). Nothing but the replay is kept: no parameters, no optimizer.

The 32 are those of both replays against its own alone. Against the first experiment it is 18 [9, 27]. If an action
lasts for 2 steps, the first experiment seldom finds the top, and its replay helps little: 3 [-5, 12]. In a trial with 4
steps, and with the network of `sac.py`, all seeds of a first experiment learned within 2,500 actions.
"""

import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from experiment import Parser, agent, plot, report
from tqdm import tqdm

import jaxreplay as jr

HOLD, INTERVAL = 3, 250
FIRST, ALONE, MIXED = "first experiment", "second, its own replay", "second, both replays"


def make_agent(source: str, hold: int, interval: int) -> Any:
    """The agent of `rlpd.py`, whose actions last for `hold` steps of the car; its data is a saved replay."""
    sizes = {"CAPACITY, BATCH, WIDTH": (2**14, 64, 32), "EPISODES, HORIZON": (1, -(-999 // hold))}
    steps = {"WARMUP, STEPS, INTERVAL": (250, 0, interval)}
    rlpd = agent("rlpd", SOURCE=source, **sizes, **steps)
    rlpd.mixture, car = jr.Mixture(buffers=(rlpd.own, rlpd.own), shares=(0.5, 0.5)), rlpd.env

    class Held(type(car)):
        def step_env(self, key: jax.Array, state: Any, action: jax.Array, params: Any) -> Any:
            def step(before: Any, _: None) -> tuple[Any, None]:
                obs, state, reward, terminated, info = car.step_env(key, before[1], action, params)
                after = obs, state, before[2] + reward, terminated, info
                return jax.tree.map(lambda x, y: jnp.where(before[3], x, y), before, after), None

            first = car.step_env(key, state, action, params)
            return jax.lax.scan(step, first, length=hold - 1)[0]

    rlpd.env = Held()
    return rlpd


def main() -> None:
    parser = Parser("A second experiment that draws half of each batch from the replay of a first one.", seeds=32)
    parser.add_argument("--steps", type=int, default=5_000, help="actions and updates of each experiment (5000)")
    parser.add_argument("--hold", type=int, default=HOLD, help=f"steps that an action lasts ({HOLD})")
    args, curves = parser.parse(), {}
    steps, interval = (100, 50) if args.short else (args.steps, INTERVAL)
    first_keys, second_keys = (jax.random.split(key, args.seeds) for key in jax.random.split(jax.random.key(args.seed)))

    def train(name: str, rlpd: Any, states: Any) -> Any:
        step, tests = jax.jit(jax.vmap(rlpd.train), donate_argnums=0), []
        for _ in tqdm(range(steps // interval), desc=name, unit=f" x {interval} steps"):
            states, found = step(states)
            tests.append(np.asarray(found))
        curves[name] = np.stack(tests, axis=1)
        return states

    online, both = (make_agent(source, args.hold, interval) for source in ("online", "both"))
    begin = jax.jit(jax.vmap(online.init))
    with tempfile.TemporaryDirectory() as folder:
        first = train(FIRST, online, begin(first_keys))
        jr.save(folder, online.own, first.buffer[0])  # of all seeds, stacked
        train(ALONE, online, begin(second_keys))
        states = begin(second_keys)
        saved = jr.restore(folder, both.own, states.buffer[0])
        train(MIXED, both, states.replace(buffer=(states.buffer[0], saved)))

    figures = {name: x.mean(axis=1) for name, x in curves.items()}
    figures["both less its own"] = figures[MIXED] - figures[ALONE]
    figures["both less the first"] = figures[MIXED] - figures[FIRST]
    path = args.out / ("rae.png" if args.hold == HOLD else f"rae_hold_{args.hold}.png")
    times = interval * np.arange(1, steps // interval + 1)
    title, ylabel = "A car on a hill, Soft Actor-Critic", f"return of {online.TESTS} test episodes"
    plot(path, title, {"": curves}, ("actions and updates per seed in an experiment", times), ylabel)
    about = f"{ylabel}, actions of {args.hold} steps, {steps:,} in an experiment, {args.seeds} seeds"
    report(path, f"{title}: mean over training of the {about}", figures, 0)


if __name__ == "__main__":
    main()
