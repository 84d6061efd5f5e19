"""The recipe `as_flashbax` against flashbax itself: the same adds give the same items, samples and probabilities."""

import importlib.metadata
import importlib.util
import pathlib
import re
import sys
import warnings

import flashbax as fbx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import rarely, rejects

FILE = pathlib.Path(__file__).parent.parent / "examples/recipes/as_flashbax.py"
TRAJECTORIES = {"add_batch_size": 3, "sample_batch_size": 64, "min_length_time_axis": 6}


def sized(max_length, min_length, sample_batch_size, *flags, **more):
    """Sizes of a buffer without time, with these flags."""
    sizes = {"max_length": max_length, "min_length": min_length, "sample_batch_size": sample_batch_size}
    return sizes | dict.fromkeys(flags, True) | more


def of_time(sequence_length, period, **more):
    return {**TRAJECTORIES, "sample_sequence_length": sequence_length, "period": period, **more}


SEQUENCES, BATCHES = "add_sequences", "add_batches"
CASES = {  # the maker, its sizes, and leading axes of added steps
    "trajectories": ("trajectory", of_time(4, 1, max_length_time_axis=11), [(3, 3), (3, 2), (3, 1), (3, 7), (3, 11)]),
    # Up to full: later, starts of a period differ.
    "trajectories, max_size": ("trajectory", of_time(7, 2, max_size=60), [(3, 6), (3, 1), (3, 13)]),
    "prioritised, period": (
        "prioritised_trajectory",
        of_time(4, 3, max_length_time_axis=14),
        [(3, 5), (3, 1), (3, 5), (3, 4), (3, 1)],
    ),
    "pairs": ("flat", sized(20, 3, 16), [()] * 23),
    "pairs, batches": ("flat", sized(31, 7, 16, add_batch_size=3), [(3,)] * 14),
    "pairs, sequences": ("flat", sized(30, 1, 16, SEQUENCES), [(1,), (4,), (30,), (7,)]),
    "prioritised pairs": (
        "prioritised_flat",
        sized(30, 1, 16, SEQUENCES, add_batch_size=2),
        [(2, 1), (2, 4), (2, 8), (2, 7)],
    ),
    "items": ("item", sized(9, 2, 8), [()] * 13),
    "items, both": ("item", sized(20, 0, 8, SEQUENCES, BATCHES), [(2, 3), (5, 2), (1, 7)]),
    "items, batches": ("item", sized(20, 9, 8, BATCHES), [(6,), (3,), (12,)]),
    "prioritised items": ("prioritised_item", sized(12, 1, 8, SEQUENCES), [(5,), (6,), (4,)]),
}


@pytest.fixture(scope="module")
def ours():
    """The recipe as a module."""
    spec = importlib.util.spec_from_file_location("as_flashbax", FILE)
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    return module


def numbered(first, leading):
    """Steps with the numbers from `first` on, and how many they are."""
    count = int(np.prod(leading, dtype=int))
    number = np.arange(first, first + count, dtype=np.int32).reshape(leading)
    half = jnp.asarray(np.broadcast_to(number[..., None, None] / 2, (*leading, 2, 3)), jnp.float32)
    frame = jnp.asarray(number % 251, jnp.uint8)[..., None]
    return {"number": jnp.asarray(number), "half": half, "frame": frame, "odd": jnp.asarray(number % 2 == 1)}, count


def makers(ours, kind, sizes):
    """flashbax's buffer and the recipe's, with compiled functions, as flashbax's programs have them."""
    more = {"priority_exponent": 0.5} if "prioritised" in kind else {}
    made = []
    for module in (fbx, ours):
        with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
            warnings.simplefilter("ignore")  # flashbax's about sizes
            patch.setattr("builtins.print", lambda *text: None)
            buffer = getattr(module, f"make_{kind}_buffer")(**sizes, **more)
        made.append(buffer.replace(add=jax.jit(buffer.add, donate_argnums=0), sample=jax.jit(buffer.sample)))
    return made


def drawn(buffer, state):
    """The items of many draws, each once, by their numbers [..., steps]; and the indices and probabilities of each."""
    samples = jax.vmap(lambda key: buffer.sample(state, key))(jax.random.split(jax.random.PRNGKey(0), 64))
    experience = samples.experience
    if isinstance(experience, tuple):
        experience = jax.tree.map(lambda *x: jnp.stack(x, axis=2), experience.first, experience.second)
    items = jax.tree.map(lambda x: np.asarray(x).reshape(-1, *x.shape[2:]), experience)
    number = items["number"]
    np.testing.assert_array_equal(items["half"], np.broadcast_to(number[..., None, None] / 2, items["half"].shape))
    np.testing.assert_array_equal(items["frame"][..., 0], number % 251)
    np.testing.assert_array_equal(items["odd"], number % 2 == 1)
    rows, first = np.unique(number.reshape(len(number), -1), axis=0, return_index=True)
    named = {name: getattr(samples, name, None) for name in ("indices", "probabilities")}
    return rows, {name: x if x is None else np.asarray(x).reshape(-1)[first] for name, x in named.items()}


def layout(sample, names):
    """Shapes and dtypes of the fields `names` of a sample, or of an array."""
    found = {name: getattr(sample, name) for name in names} if names else sample
    if "experience" in names and isinstance(sample.experience, tuple):
        found["experience"] = sample.experience._asdict()
    return jax.tree.map(lambda x: f"{x.dtype}{x.shape}", found)


@pytest.mark.parametrize("case", [name if name == "items" else rarely(name) for name in CASES])
def test_items_and_samples_are_those_of_flashbax(case, ours):
    kind, sizes, adds = CASES[case]
    buffers = makers(ours, kind, sizes)
    names = ("experience", "indices", "probabilities")[: 3 if "prioritised" in kind else 1]
    states, num_steps, ready, num_items, uneven = [x.init(numbered(0, ())[0]) for x in buffers], 0, [], 0, 0

    def both(function, *args):
        return [function(*each) for each in zip(buffers, states, *args, strict=True)]

    for leading in adds:
        batch, count = numbered(num_steps, leading)
        num_steps += count
        states = both(lambda buffer, state, batch=batch: buffer.add(state, batch))
        theirs, found = both(lambda buffer, state: buffer.can_sample(state))
        assert (layout(theirs, ()), bool(theirs)) == (layout(found, ()), bool(found))
        ready.append(bool(theirs))
        if not theirs:
            continue
        theirs, found = both(lambda buffer, state: layout(buffer.sample(state, jax.random.PRNGKey(1)), names))
        assert theirs == found
        for _ in range(1 + (len(names) > 1)):
            (rows, theirs), (ours_rows, found) = both(drawn)
            np.testing.assert_array_equal(rows, ours_rows)
            num_items += len(rows)
            if len(names) > 1:
                np.testing.assert_allclose(theirs["probabilities"], found["probabilities"], rtol=1e-5)
                uneven += np.ptp(found["probabilities"]) > 0.01
                # Their roots are whole numbers: flashbax rounds the leaf of a new sequence down to one.
                priorities = jnp.asarray((1 + rows[:, 0] % 4) ** 2, jnp.float32)
                indices = [jnp.asarray(x["indices"]) for x in (theirs, found)]
                states = both(lambda buffer, state, at, to=priorities: buffer.set_priorities(state, at, to), indices)
    assert ready[-1]
    assert num_items > 12
    assert num_steps >= sizes.get("max_length", 0) or "trajectory" in kind
    assert uneven >= (len(ready) if len(names) > 1 else 0)


def test_the_start_of_flashbax_readme_runs(ours, monkeypatch, capsys):
    """With its one import changed. A draw is one of the two transitions that are stored."""
    text = importlib.metadata.metadata("flashbax").get_payload()
    (program,) = re.findall(r"^```python\n(import jax\n.*?)^```$", text, re.MULTILINE | re.DOTALL)
    monkeypatch.setitem(sys.modules, "as_flashbax", ours)
    changed = program.replace("import flashbax as fbx", "import as_flashbax as fbx")
    assert changed != program
    exec(changed, {})
    *ready, transition = capsys.readouterr().out.splitlines()
    assert ready == ["False", "False", "True"]
    assert transition in ("obs = [[1 2]], obs' = [[4 5]]", "obs = [[4 5]], obs' = [[7 8]]")
    names = set(re.findall(r"fbx\.(make_\w+)", text))
    assert names - {*vars(ours)} == {"make_trajectory_queue"}


@pytest.mark.slow
def test_the_recipe_agent_runs_with_flashbax_too():
    """With the recipe's own buffer: `test_recipes.py`."""
    _, agent = FILE.read_text().split('if __name__ == "__main__":')
    names = {"jax": jax, "jnp": jnp, "make_prioritised_flat_buffer": fbx.make_prioritised_flat_buffer}
    exec("if True:" + agent, names)
    np.testing.assert_allclose(names["values"], 0.99 ** np.arange(4, -1, -1), atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("item", sized(4, 5, 2)),
        ("flat", sized(4, 4, 2)),
        ("flat", sized(4, 1, 2, add_batch_size=4)),
        ("prioritised_item", sized(4, 1, 2, priority_exponent=-1.0)),
        ("trajectory", of_time(9, 1, max_length_time_axis=8)),
    ],
)
@pytest.mark.filterwarnings("ignore:`sample_sequence_length`")
def test_wrong_sizes_are_errors_of_both(kind, sizes, ours):
    for module in (fbx, ours):
        message = "must be|is used|is too large|minimum|larger|at least|length"
        rejects(message, getattr(module, f"make_{kind}_buffer"), **sizes)


def test_shapes_of_other_axes_are_errors(ours):
    trajectories = ours.make_trajectory_buffer(3, 4, 2, 1, 2, max_length_time_axis=8)
    for buffer, axes in (trajectories, (2, 3, 2)), (ours.make_flat_buffer(32, 2, 4, add_batch_size=3), (6, 2)):
        state = jax.eval_shape(lambda buffer=buffer: buffer.init(jnp.zeros(2)))
        rejects("num_envs=3", jax.eval_shape, buffer.add, state, np.zeros(axes, np.float32))


def test_the_names_that_agents_annotate_with(ours):
    """Of each class of each module of buffers, and what two agents import. The state of a buffer is of its type."""
    buffer = ours.make_prioritised_trajectory_buffer(2, 4, 2, 1, 2, max_size=16)
    state, rows = buffer.init(jnp.zeros(3)), jnp.arange(18.0).reshape(2, 3, 3)
    modules = {name: x for name, x in vars(fbx).items() if name.endswith("_buffer") and not callable(x)}
    assert len(modules) == 6
    for name, module in modules.items():
        kinds = [x for x, kind in vars(module).items() if "Buffer" in x or "Sample" in x]
        for kind in kinds:
            assert hasattr(getattr(ours, name), kind) or kind == "SumTreeState", (name, kind)
    annotation = ours.flat_buffer.TrajectoryBufferState[jax.Array]
    assert isinstance(buffer, ours.flat_buffer.TrajectoryBuffer)
    step = jax.jit(lambda state, mask: buffer.add(state, rows, mask))
    same, state = step(state, False), step(state, True)
    assert isinstance(state, annotation)
    assert isinstance(state, ours.trajectory_buffer.BufferState)
    assert not np.any(same.experience)
    np.testing.assert_array_equal(state.experience[:, :3], rows)
    assert isinstance(buffer.set_priorities(state, np.zeros(1, int), np.ones(1)), annotation)
    narrow = buffer.init(jnp.zeros(3, jnp.bfloat16))
    rejects("state.experience: stored otherwise here; read a sample", lambda: narrow.experience)
    rejects("one of max_size and max_length", ours.make_trajectory_buffer, 2, 4, 2, 1, 2)


@pytest.mark.slow
def test_what_differs_is_as_its_head_says(ours):
    key, leaf = jax.random.PRNGKey(0), {}
    for module in (fbx, ours):
        buffer = module.make_prioritised_item_buffer(**sized(4, 1, 4, priority_exponent=1.0))
        empty = buffer.init(jnp.float32(0))
        state = buffer.add(empty, jnp.float32(1))
        one = buffer.sample(state, key).indices[:1]
        state = buffer.set_priorities(state, one, jnp.array([2.75]))
        sample = buffer.sample(buffer.add(state, jnp.float32(2)), key)
        leaf[module] = sample.probabilities[sample.experience == 2][0]
        for number in range(4):  # overwrites the first
            state = buffer.add(state, jnp.float32(3 + number))
        late = buffer.set_priorities(state, one, jnp.array([0.0]))
        found = [buffer.sample(late, key) for key in jax.random.split(key, 9)]
        assert len(np.unique([x.experience for x in found])) == (4 if module is ours else 3)
        broken = buffer.set_priorities(state, buffer.sample(state, key).indices[:1], jnp.array([jnp.nan]))
        assert bool(jnp.all(jnp.isfinite(buffer.sample(broken, key).probabilities))) == (module is ours)
        np.testing.assert_array_equal(np.sort(state.experience), [[3, 4, 5, 6]])
    np.testing.assert_allclose([leaf[fbx], leaf[ours]], [2 / 4.75, 1 / 2], rtol=1e-5)
    rejects("empty", buffer.sample, empty, key)
    indices, priorities = buffer.sample(state, key).indices, jnp.arange(1.0, 5.0)
    signed = [buffer.set_priorities(state, indices, sign * priorities) for sign in (1, -1)]
    positive, negative = (buffer.sample(state, key).probabilities for state in signed)
    np.testing.assert_array_equal(positive, negative)
    assert np.ptp(positive) > 0.1
