import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import pointers, rarely, rejects
from jax import lax
from streams import NUM_ENVS, as_rows, make_episodes

import jaxreplay as jr


@pytest.mark.versions
@pytest.mark.parametrize("dtype", [bool, jnp.int32, rarely(jnp.float32)])
def test_next_step_autoreset_gives_a_row_to_every_final_observation(dtype):
    """An environment with same-step autoreset, in a scan under vmap, gives the rows of the convention.

    Flags may be numbers.
    """
    num_rows = 60
    streams = make_episodes(1, num_rows + 1)
    following = [np.concatenate([x["frame"][1:] for x in episodes])[:num_rows] for episodes in streams]
    table = as_rows(streams, num_rows + 1, final_rows=False) | {"following": np.stack(following, axis=1)}
    table = jax.device_put(table)

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
        return lax.scan(row, carry, jax.random.split(jax.random.key(0), num_rows))[1]

    got = jax.tree.map(lambda x: x.swapaxes(0, 1), jax.device_get(run(np.arange(NUM_ENVS))))
    expected = as_rows(streams, num_rows, final_rows=True)
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


def test_a_state_shares_no_array_with_what_it_is_made_of():
    """So that a caller may donate both."""
    given = jnp.arange(4.0)
    state = jr.NextStepAutoreset(env_step=lambda *_: _).init(given, {"x": given, "y": given})
    found = pointers((state, given))
    assert len({*found}) == len(found) == 5
