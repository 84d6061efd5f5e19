"""Every recipe runs as it stands, and learns what its page says. The pages show the files of `examples/recipes`."""

import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import seeds
from helpers import leaves_of, rarely, rejects

import jaxreplay as jr

ROOT = pathlib.Path(__file__).parent.parent
FOLDER = ROOT / "examples/recipes"
PAGES = {page.stem: page.read_text() for page in (ROOT / ".docs/pages/recipes").glob("*.md")}
PARTS = re.compile(r"^## (.*?)\n.*?(?=^## |\Z)", re.MULTILINE | re.DOTALL)
SHOWN = re.compile(r"^\[`(examples/recipes/(\w+)\.py)`\]\(\.\./\.\./\.\./\1\) <!-- included -->$", re.MULTILINE)
ON_THE_WAY = 0.99 ** np.arange(4, -1, -1)  # values of the corridor's cells


def run(recipe, **numbers):
    """The names that a recipe binds, run with other numbers than the file's."""
    path = FOLDER / f"{recipe}.py"
    source = path.read_text()
    for old, new in numbers.values():
        assert source.count(old) == 1, f"{old}: not once in the recipe"
        source = source.replace(old, new)
    names = {"__name__": "__main__"}
    exec(compile(source, path, "exec"), names)
    return names


def dqn():
    found = run("dqn")
    np.testing.assert_allclose(found["q"](found["params"], found["walk"]).max(axis=1), ON_THE_WAY, atol=0.02)
    assert found["losses"][-100:].mean() < 1e-3
    assert found["replay"].rows.size == 3_000  # each frame once
    assert found["replay"].storage["frame"].dtype == np.uint8
    check_wrapped(found["of_wrapper"])


def check_wrapped(of_wrapper):
    """Its stacks equal those of a wrapper whose queue is filled with the first frame of each episode."""
    frames = seeds.rng(0).integers(1, 256, (1, 40, 6)).astype(np.uint8)
    ends, stacks, queue = np.arange(40) % 7 == 5, [], []
    for t, frame in enumerate(frames[0]):
        queue = [*queue, frame][-4:] if t and not ends[t - 1] else [frame] * 4
        stacks.append(np.stack(queue, axis=-1))
    wrapped = np.stack(stacks)[None]
    np.testing.assert_array_equal(of_wrapper(wrapped[..., -1], ends[None]), wrapped[:, 3:])


def rainbow():
    found = run("rainbow")
    np.testing.assert_allclose(found["values"], ON_THE_WAY, atol=0.03)
    sampler = found["replay"].sampler
    assert (sampler.updates, sampler.rejected) == (3_000 - 2, 0)  # two steps before the first transition
    assert found["sampler"].beta(sampler.updates) > 0.999
    leaves = leaves_of(sampler.tree)[: int(found["buffer"].size(found["replay"]))]
    assert np.median(leaves) < 0.3 * leaves.max()  # what is known well is drawn less often


def sac():
    found = run("sac")
    rewards, replay = found["rewards"], found["replay"]
    assert rewards[:500].mean() < -0.5 < -0.1 < rewards[-500:].mean()
    assert found["buffer"].size(replay) == 4 * 5_000
    stored = found["buffer"].get(replay, found["buffer"].newest(replay, 4 * 5_000))
    np.testing.assert_array_equal(stored.In, np.float32(0.99))  # truncated or not
    assert np.mean(stored.S == 1.5) > 1 / 60  # episodes start there, and none of them is followed by the next
    assert not np.any(stored.S_next == 1.5)


def td3_lap():
    found = run("td3_lap")
    left, right = found["act"](found["params"]["actor"], jnp.array([-1.0, 1.0]), 0.0)
    assert (left > 0.9) & (right < -0.9)
    replay = found["replay"]
    leaves = leaves_of(replay.sampler.tree)[: int(found["buffer"].size(replay))]
    assert leaves.size == 24_000
    assert leaves.min() == 1  # no priority below the floor
    assert np.mean(leaves == 1) > 0.5
    assert leaves.max() > 1.2


def r2d2():
    found = run("r2d2")
    rewards, (_, _, replay), buffer = found["rewards"], found["carry"], found["buffer"]
    assert rewards[:10].mean() < 0.6 < 0.8 < rewards[-10:].mean()
    assert buffer.size(replay) == 8 * ((10_000 - 80) // 40 + 1)
    sample = buffer.sample(replay, jax.random.key(0), 256)
    over = np.asarray(sample.items["terminated"])
    np.testing.assert_array_equal(sample.mask, np.cumsum(over, axis=1) - over == 0)
    assert 0.5 < np.mean(sample.mask) < 0.9
    np.testing.assert_array_equal(sample.weights, 1)
    assert len(np.unique(sample.probabilities)) > 100


def dreamer():
    found = run("dreamer")
    errors, buffer = found["errors"], found["buffer"]
    assert errors[-1] < 0.01 < 0.1 < errors[0]
    assert found["num_updates"] * 16 * 64 == 32 * 4 * 64
    _, (params, replay) = found["carry"]
    newest = buffer.sample(replay, jax.random.key(0), 4, max_age=1)
    assert len(set(newest.indices.tolist())) == 4
    np.testing.assert_array_equal(newest.age, 0)

    def is_fresh(replay):  # whether the stored states are those of an unroll from the first of them
        items = buffer.get(replay, newest.indices)
        latent, stored = items["latent"][:, 0], []
        for t in range(64):
            stored.append(latent)
            latent, _ = found["cell"](params, latent, items["obs"][:, t])
        return np.abs(np.stack(stored, axis=1) - items["latent"]).max() < 1e-4

    assert not is_fresh(replay)
    (_, fresh), _ = found["learn"]((params, replay), newest)
    assert is_fresh(fresh)


def qmix():
    found = run("qmix")
    params, first = found["params"], int(found["first"])
    assert found["payoffs"][first, *params["q"][1 + first].argmax(axis=-1)] == 8
    assert found["errors"][-1] < 1e-3 < found["errors"][0]
    buffer, replay = found["buffer"], found["replay"]
    assert buffer.is_full(replay)
    episodes = buffer.sample(replay, jax.random.key(0), 256).items
    np.testing.assert_array_equal(episodes["state"][:, 1], 1 + episodes["actions"][:, 0, 0])  # of one episode


def cloning():
    found = run("cloning")
    rows, exists = np.asarray(found["rows"]), np.asarray(found["weights"]) > 0
    assert rows.shape == (10, found["num_batches"], 256) == (10, 4, 256)
    for order, there in zip(rows, exists, strict=True):
        np.testing.assert_array_equal(np.sort(order[there]), np.arange(1_000))
    assert len({tuple(order.ravel()) for order in rows}) == 10
    errors = found["errors"].mean(axis=1)
    assert np.all(np.diff(errors) < 0)
    assert errors[-1] < 0.15 < 0.4 < errors[0]
    chosen = (found["obs"] @ found["params"]).argmax(axis=1)
    assert np.mean(chosen == found["demonstrations"]["action"]) > 0.98


def keep_best():
    found = run("keep_best")
    lowest, kept = np.asarray(found["lowest"]), found["kept"]
    assert np.all(lowest[1:] >= lowest[:-1])
    assert found["rewards"][:5].mean() < 0.5  # a third by chance
    assert found["rewards"][-50:].mean() > 13
    np.testing.assert_array_equal(kept.scores, 16)
    np.testing.assert_array_equal(kept.levels["actions"], np.tile(found["code"], (32, 1)))
    np.testing.assert_array_equal(found["policy"].argmax(axis=1), found["code"])


def rlpd():
    found = run("rlpd")
    values = found["params"].min(axis=0).max(axis=-1)
    np.testing.assert_allclose(values[:49], 0.99 ** np.arange(48, -1, -1), atol=0.03)
    assert found["buffer"].counts(20 * 256) == (2_560, 2_560)
    places = found["places"][-1]  # their mean in each of the 20 batches of a step
    np.testing.assert_allclose(places, places.mean(), atol=3)  # of one source alone they would be off by twice that
    sources = zip(found["buffer"].buffers, found["replay"], strict=True)
    online, offline = (buffer.sample(state, jax.random.key(0), 256).items.S.mean() for buffer, state in sources)
    assert offline - online > 10
    np.testing.assert_allclose(places.mean(), (online + offline) / 2, atol=2)


def to_minari():
    found = run("to_minari")
    episodes = [*found["dataset"].iterate_episodes()]
    starts, cut = 0, 0
    for episode in episodes:
        x, speed, angle, _ = episode.observations.T
        np.testing.assert_allclose(x[1:], x[:-1] + 0.02 * speed[:-1], atol=1e-5)  # no reset inside
        ends = episode.terminations | episode.truncations
        np.testing.assert_array_equal(ends, np.arange(len(episode)) == len(episode) - 1)
        assert episode.terminations[-1] == (np.abs(x[-1]) > 2.4 or np.abs(angle[-1]) > np.pi / 15)
        starts, cut = starts + np.all(np.abs(episode.observations[0]) <= 0.05), cut + episode.truncations[-1]
    assert 0 < cut <= found["num_envs"]  # streams whose last episode goes on
    assert 0 < len(episodes) - starts <= found["num_envs"]  # streams whose oldest episode is partly overwritten
    stored = found["buffer"].get(found["replay"], found["buffer"].newest(found["replay"], 4 * 199))
    assert found["dataset"].total_steps == np.sum(stored["step"][:, 0])
    rows = jr.datasets.from_minari(found["dataset"]).rows
    kept = np.asarray(stored["observation"])[:, 0][np.asarray(stored["step"])[:, 0]]
    assert sorted(rows["observation"][rows["step"]].tolist()) == sorted(kept.tolist())


def reached(found):
    """The share of goals that the greedy policy reaches."""
    bits = found["bits"]
    state, goal = jax.random.bernoulli(jax.random.key(1), 0.5, (2, 200, bits))
    for _ in range(bits):
        action = jnp.argmax(found["q"](found["params"], state, goal), axis=1)
        flip = (jnp.arange(bits) == action[:, None]) & jnp.any(state != goal, axis=1)[:, None]
        state = state ^ flip
    return jnp.mean(jnp.all(state == goal, axis=1))


def her():
    assert reached(run("her")) > 0.95
    assert reached(run("her", share=('"share": 0.8', '"share": 0.0'), steps=("3_000", "1_000"))) < 0.05


def nfsp():
    found = run("nfsp")
    _, _, ring, reservoir = found["carry"]
    policies = np.asarray(found["policies"][10_000:])  # with a ring in place of the reservoir, off by 0.5 at times
    np.testing.assert_allclose(policies, np.broadcast_to([0.25, 0.5, 0.25], policies.shape), atol=0.1)
    num_best = int(reservoir.count[1])
    assert abs(num_best - 0.1 * 128 * 20_000) < 5 * (0.09 * 128 * 20_000) ** 0.5
    assert found["everything"].is_full(reservoir)
    assert found["newest"].is_full(ring)


def groups():
    found = run("groups")
    assert found["solved"].mean() > 0.9
    staleness, bound = np.asarray(found["staleness"]), found["bound"]
    assert staleness.max() == bound - 1  # all that the bound allows, and nothing older
    assert set(np.unique(staleness[100])) == set(range(bound))
    assert found["rewards"][-50:].mean() > 0.5 > found["rewards"][:50].mean()
    stored = found["buffer"].sample(found["replay"], jax.random.key(0), 256).items["rewards"].mean(axis=1)
    assert np.all((stored > 0) & (stored < 1))  # a group that says nothing is not stored


def pace():
    found = run("pace", seeds=("128, 8, 64, 4, 16", "128, 8, 64, 4, 2"))
    logs, bound = found["logs"], found["bound"]
    for name, log in logs.items():
        assert np.all(log["fast"][:, -1] > 0.9)
        assert np.all(log["slow"][:, -1] < 0.05) if name == "discards" else np.all(log["slow"][:, -1] > 0.9)
        assert np.all(np.diff(log["updates"], prepend=0) == np.any([log["learned"] > 0], axis=0))
    assert logs["discards"]["staleness"].max() == logs["waits"]["staleness"].max() == bound
    assert logs["keeps all"]["staleness"].max() > 2 * bound
    groups = {name: log["learned"].sum(axis=1) for name, log in logs.items()}
    assert np.all(groups["discards"] < 0.6 * groups["waits"])
    assert np.all(groups["waits"] > 0.95 * groups["keeps all"])  # nothing is lost; some groups are still to be drawn
    assert np.all(logs["waits"]["updates"][:, -1] < logs["discards"]["updates"][:, -1])  # the price


def processes():
    path, command = FOLDER / "processes.py", {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    ended = subprocess.run([sys.executable, path], timeout=300, **command)
    assert (ended.returncode, ended.stderr) == (0, "")
    first, last = map(float, re.fullmatch(r"episodes that reach the goal: (.*), then (.*)\n", ended.stdout).groups())
    assert first < 0.2 < 0.8 < last <= 1  # what is learned reaches the actors
    sys.stdout.write(ended.stdout)
    source = path.read_text()
    for old, new in {
        "1_000": "10**9",
        "(np.asarray(q))": "(np.asarray(q)); print(*(x.pid for x in multiprocessing.active_children()), flush=True)",
        "    buffer, one": "    __import__('helpers').interruptible()\n    buffer, one",
        "            pipe.send([": "            assert 'jax' not in __import__('sys').modules\n            pipe.send([",
    }.items():
        assert source.count(old) == 1
        source = source.replace(old, new)
    with tempfile.TemporaryDirectory() as folder:
        (changed := pathlib.Path(folder, "changed.py")).write_text(source)
        paths = os.pathsep.join((str(ROOT), str(ROOT / "tests")))
        command |= {"start_new_session": True, "env": {**os.environ, "PYTHONPATH": paths}}
        # As a terminal does, to all processes of the program; then to an actor alone.
        code, out, err = outcome_of([sys.executable, changed], command, lambda pid, _: os.killpg(pid, signal.SIGINT))
        assert (code, err) == (0, "")
        assert "reach the goal" in out
        code, _, err = outcome_of([sys.executable, changed], command, lambda _, actor: os.kill(actor, signal.SIGKILL))
        assert code == 1
        assert re.search(r"(?s)(EOFError|ConnectionResetError|BrokenPipeError).*direct cause.*Closed: sample", err)


def outcome_of(program, command, end):
    """The code and the output of a program that `end` ends, given its pid and an actor's; all actors are gone."""
    with subprocess.Popen(program, **command) as process:
        actors = [process.stdout.readline().split() for _ in range(20)][-1]
        end(process.pid, int(actors[0]))
        out, err = process.communicate(timeout=60)
    assert len(actors) == 2
    for pid in map(int, actors):
        rejects("No such process", os.kill, pid, 0, error=ProcessLookupError)
    return process.returncode, out, err


def as_flashbax():
    """Against flashbax itself: `test_as_flashbax.py`."""
    np.testing.assert_allclose(run("as_flashbax")["values"], ON_THE_WAY, atol=1e-5)


CHECKS = dqn, rainbow, sac, td3_lap, r2d2, dreamer, qmix, cloning, keep_best, rlpd, to_minari, her, nfsp, groups, pace
CHECKS = {check.__name__: check for check in (*CHECKS, processes, as_flashbax)}


@pytest.mark.filterwarnings("ignore::UserWarning:minari")  # of what describes a data set
@pytest.mark.parametrize("recipe", [name if name == "cloning" else rarely(name) for name in CHECKS])
def test_recipe(recipe, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    CHECKS[recipe]()
    assert capsys.readouterr().out  # it tells what it learned


def test_every_recipe_is_shown_and_checked():
    parts = [(part[1], SHOWN.findall(part[0])) for page in PAGES.values() for part in PARTS.finditer(page)]
    titles = {recipe: title for title, ((_, recipe),) in parts}
    assert titles.keys() == CHECKS.keys() == {path.stem for path in FOLDER.glob("*.py")}
    for path in FOLDER.glob("*.py"):  # beside the contents
        assert max(map(len, path.read_text().splitlines())) <= 88, path
    assert sum(page.count("<!-- included -->") for page in PAGES.values()) == len(parts) == len(titles)
    assert not any("```python" in page for page in PAGES.values())  # code stands in the files alone
    assert all(f"#{title.lower().replace(' ', '-')})" in PAGES["index"] for title in titles.values())


def test_command():
    """The commands of the index install the package and run a recipe from its file."""
    block = re.compile(r"^```sh\n(python3 .*)\n\.venv/bin/python (.*)\n```$", re.MULTILINE)
    ((install, path),) = block.findall(PAGES["index"])
    assert install.endswith("pip install -q -e .")
    assert ROOT / path == FOLDER / "sac.py"
