import jax
import jax.numpy as jnp
import numpy as np
import pytest
import seeds
from helpers import rarely, rejects, stack
from jax import lax

import jaxreplay as jr

NUM_ROWS, NUM_ENVS = 60, 3


def make_steps():
    """Steps of environments with same-step autoreset: behind an end the first frame of the next episode, beside what
    was `following`."""
    rng, shape = seeds.rng(1), (NUM_ROWS + 1, NUM_ENVS)
    ends, is_terminal = rng.random((2, *shape)) < [[[0.25]], [[0.5]]]
    frames, final = rng.integers(1, 256, (2, *shape, 2, 2)).astype(np.uint8)
    return {
        "frame": frames,
        "action": np.arange(ends.size, dtype=np.int32).reshape(shape),  # names the step
        "reward": rng.normal(size=shape).astype(np.float32),
        "terminated": ends & is_terminal,
        "truncated": ends & ~is_terminal,
        "following": np.where(ends[..., None, None], final, np.roll(frames, -1, axis=0)),
    }


def with_final_rows(steps):
    """A row for each step, and behind an end one for its final observation."""
    envs = []
    for env in range(NUM_ENVS):
        rows = []
        for time in range(NUM_ROWS):
            row = {name: x[time, env] for name, x in steps.items() if name != "following"} | {"step": np.True_}
            none = {name: np.zeros_like(x) for name, x in row.items()} | {"frame": steps["following"][time, env]}
            rows += [row, none] if row["terminated"] | row["truncated"] else [row]
        envs.append(stack(*rows[:NUM_ROWS]))
    return jax.tree.map(lambda *x: np.stack(x, axis=1), *envs)


@pytest.mark.versions
@pytest.mark.parametrize("dtype", [bool, jnp.int32, rarely(jnp.float32)])
def test_next_step_autoreset_gives_a_row_to_every_final_observation(dtype):
    """An environment with same-step autoreset, in a scan under vmap, gives the rows of the convention.

    Flags may be numbers.
    """
    steps = make_steps()
    table = jax.device_put(steps)

    def env_step(key, state, action):
        time, env = state
        now = jax.tree.map(lambda x: x[time, env], table)
        ends = ((3 * now[name]).astype(dtype) for name in ("terminated", "truncated"))
        return table["frame"][time + 1, env], (time + 1, env), now["reward"], *ends, now["following"]

    env = jr.NextStepAutoreset(env_step=env_step)

    def row(carry, key):
        state, obs = carry
        action = table["action"][state.env]
        state, next_obs, reward, terminated, truncated, step = env.step(state, action, key)
        new = {"frame": obs, "action": jnp.where(step, action, 0), "reward": reward, "terminated": terminated}
        return (state, next_obs), {**new, "truncated": truncated, "step": step}

    @jax.jit
    @jax.vmap
    def run(index):
        obs = table["frame"][0, index]
        carry = env.init((jnp.int32(0), index), obs), obs
        return lax.scan(row, carry, jax.random.split(jax.random.key(0), NUM_ROWS))[1]

    got = jax.tree.map(lambda x: x.swapaxes(0, 1), jax.device_get(run(np.arange(NUM_ENVS))))
    expected = with_final_rows(steps)
    assert not expected["step"].all()
    for name, x in expected.items():
        np.testing.assert_array_equal(got[name], x, err_msg=name)
        assert got[name].dtype == x.dtype


STEP = {"obs": 0.0, "env_state": 0.0, "reward": 1.0, "terminated": False, "truncated": False, "final_obs": 0.0}


@pytest.mark.versions
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"obs": None}, r"wrong structure: missing \['obs'\]; got .*, the state before env_step stores"),
        (
            {"obs": np.zeros(3)},
            r"leaf \['obs'\]: got float.*\[3\], the state before env_step stores float.*\[\]",
        ),
        ({"obs": 0}, r"leaf \['obs'\]: got int.*\[\], the state before env_step stores float.*\[\]; x.astype"),
        ({"env_state": {"a": 0.0}}, r"wrong structure: missing \['env_state'\]; unexpected \['env_state'\]\['a'\]"),
        ({"final_obs": np.zeros(3)}, r"leaf \['final_obs'\]: got .*\[3\], the state before env_step stores .*\[\]"),
        ({"reward": None}, "reward: got None, expected a real number"),
        ({"reward": {"agent": 1.0}}, "reward: got a dict, expected a real number"),
        ({"terminated": None}, r"terminated: got None, expected bool\[\]"),
        ({"terminated": {"agent": False}}, r"terminated: got a dict, expected bool\[\]"),
        ({"truncated": "False"}, r"truncated: got a str, expected bool\[\]"),
        ({"terminated": np.zeros(3, bool)}, r"terminated: got bool\[3\], expected bool\[\]; map with jax.vmap"),
        ({"terminated": np.zeros(1, bool)}, r"terminated: got bool\[1\], expected bool\[\]; map with jax.vmap"),
    ],
)
def test_what_an_environment_returns_is_named(changed, message):
    env = jr.NextStepAutoreset(env_step=lambda key, state, action: tuple((STEP | changed).values()))
    rejects(message, env.step, env.init(0.0, 0.0), None, jax.random.key(0))


def test_what_is_no_environment():
    rejects("env_step=None: must be a function of a key, a state and an action", jr.NextStepAutoreset, env_step=None)
    key = jax.random.key(0)
    for returned, found in ((tuple(STEP.values())[:5], "a tuple of 5"), (None, "a NoneType")):
        env = jr.NextStepAutoreset(env_step=lambda key, state, action, returned=returned: returned)
        message = f"env_step: returned {found}, expected obs, env_state, reward, term"
        rejects(message, env.step, env.init(0.0, 0.0), None, key)
    message = "state: got NoneType, expected AutoresetState, as init of NextStepAutoreset returns it"
    rejects(message, env.step, None, None, key)
