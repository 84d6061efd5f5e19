"""Every page of the documentation is a program: its blocks of Python, in their order, run from an empty file."""

import ast
import contextlib
import doctest
import importlib.util
import inspect
import io
import pathlib
import re
import sys
import tokenize
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxreplay as jr

ROOT = pathlib.Path(__file__).parent.parent
DOCS = ".docs/pages/"
NAMES = ["README.md", "examples/README.md", *(str(x.relative_to(ROOT)) for x in sorted(ROOT.glob(DOCS + "**/*.md")))]
PAGES = {name: (ROOT / name).read_text() for name in NAMES}
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# `python` is the page's program. `py` is an aside with another library: it runs, in a copy of the names so far, where
# that library is installed.
PROGRAMS = {name: page for name, page in PAGES.items() if re.search(r"^```py", page, re.MULTILINE)}


def code_of(page):
    """Blocks of Python of a page, as its kind and its source at the page's lines."""
    for fence in FENCE.finditer(page):
        if fence[1] in ("python", "py"):
            yield fence[1], "\n" * page.count("\n", 0, fence.start(2)) + fence[2]


def is_there(tree):
    """Whether all that a block imports is installed."""
    names = [x.module for x in ast.walk(tree) if isinstance(x, ast.ImportFrom)]
    names += [name.name for x in ast.walk(tree) if isinstance(x, ast.Import) for name in x.names]
    return all(importlib.util.find_spec(name.partition(".")[0]) for name in names)


def expected_after(statement, lines):
    """The comment on the lines after a statement: what it prints."""
    found = []
    for line in lines[statement.end_lineno :]:
        if not line.startswith("#"):
            break
        found.append(line[2:])
    return "\n".join(found)


def run(name, page):
    """The names that a page's program binds. What it prints stands in a comment after the statement; `...` is any text.

    Errors name the page and its lines.
    """
    namespace, outputs = {"__name__": "__main__"}, doctest.OutputChecker()
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    for kind, source in code_of(page):
        tree, lines = ast.parse(source, str(ROOT / name)), source.splitlines()
        names = namespace if kind == "python" else dict(namespace)
        for statement in tree.body if kind == "python" or is_there(tree) else ():
            with contextlib.redirect_stdout(printed := io.StringIO()):
                exec(compile(ast.Module([statement], []), str(ROOT / name), "exec"), names)
            given, expected = printed.getvalue(), expected_after(statement, lines)
            right = not given or (expected and outputs.check_output(expected, given, options))
            assert right, f"{name}:{statement.end_lineno + 1}: expected {expected!r}, got {given!r}"
    return namespace


@pytest.fixture
def elsewhere(monkeypatch, tmp_path):
    """A folder of its own; figures are not shown."""
    import matplotlib.pyplot as plt  # the oldest version warns where it is imported

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plt, "show", lambda: None)
    plt.switch_backend("agg")
    yield
    plt.close("all")


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("name", [name for name in PROGRAMS if name != "README.md"])
def test_page(name):
    run(name, PAGES[name])


class Signs:
    """Pays 1 if the action names the sign of the observation; cut off after 10 steps. With the interface of gymnax."""

    def reset(self, key):
        return jax.random.normal(key, (4,)), (jnp.int32(0), jnp.zeros(()), jnp.float32(0))

    def step(self, key, state, action):
        (time, obs, total), (next_obs, _) = state, self.reset(key)
        reward = (action == (obs > 0)).astype(jnp.float32)
        truncated = time == 9
        info = {"terminated": jnp.bool_(False), "truncated": truncated, "final_observation": next_obs}
        info["returned_episode_returns"] = total = total + reward
        state = jnp.where(truncated, 0, time + 1), next_obs[0], jnp.where(truncated, 0.0, total)
        return next_obs, state, reward, info["terminated"], truncated, info


@pytest.mark.usefixtures("elsewhere")
def test_the_readme(monkeypatch):
    """The environment is a stand-in: gymnax may not know the newest JAX. `.ci/run examples` runs the program whole."""
    gymnax, wrappers = types.ModuleType("gymnax"), types.ModuleType("gymnax.wrappers")
    gymnax.make, wrappers.LogWrapper = (lambda name: (Signs(), None)), (lambda env: env)
    monkeypatch.setitem(sys.modules, "gymnax", gymnax)
    monkeypatch.setitem(sys.modules, "gymnax.wrappers", wrappers)
    page = PAGES["README.md"]
    assert page.count("8_000") == 1
    found = run("README.md", page.replace("8_000", "1_600"))
    ends = np.asarray(found["returns"])[:, 9::10]  # of whole episodes, that all end at once
    assert ends.shape == (4, 160)
    assert np.all(ends[:, 0] < 7)
    assert np.all(ends[:, -1] > 9)
    assert pathlib.Path("quickstart.png").stat().st_size > 10_000


def test_the_first_program_is_the_same_everywhere():
    program = (ROOT / "examples/quickstart.py").read_text()
    block = [fence[2] for fence in FENCE.finditer(PAGES["README.md"]) if fence[1] == "python"][-1]
    assert program.endswith(f'"""\n\n{block}')
    assert sum(bool(line.strip()) for line in block.splitlines()) <= 60


@pytest.mark.parametrize("name", PAGES)
def test_blocks(name):
    """They fit beside the contents of a window of 1,280 pixels. Comments stand above: no formatter breaks a call.

    What a page names of jaxreplay exists.
    """
    page = PAGES[name]
    assert all(hasattr(jr, found) for found in re.findall(r"\bjr\.(\w+)", page))
    assert page.count("```") == 2 * len(FENCE.findall(page))
    assert {fence[1] for fence in FENCE.finditer(page)} <= {"sh", "python", "py", "text"}
    for _, source in code_of(page):
        compile(source, name, "exec")
        assert max(map(len, source.splitlines())) <= 88
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            above = token.line[: token.start[1]].strip() == ""
            assert token.type != tokenize.COMMENT or above, f"{name}:{token.start[0]}"


def test_the_readme_is_short():
    page = PAGES["README.md"]
    assert len(page.split()) <= 900
    assert len(page[: page.rindex("plt.savefig")].split()) <= 850


def test_the_rule_for_ends_is_the_same_everywhere():
    rule = (
        "True for the last row of {} episode{} If the stream has a row for the final observation, that row is the "
        "last: `ends=~step`. If it has none, the last row is the terminated or truncated one: "
        "`ends=terminated | truncated`."
    )
    for page in ("guides/sequences.md", "guides/recurrent.md"):
        assert rule.format("each", ".") in " ".join(PAGES[DOCS + page].split())
    assert rule.format("an", "; zeros if no episode ever ends.") in " ".join(jr.SequenceBuffer.add.__doc__.split())


def calls(text):
    """Calls `jr.Name(...)`, `buffer.name(...)` and `tracer.name(...)` of a text, as their place, name and keywords."""
    for found in re.finditer(r"\b(jr|buffer|tracer)\.(\w+)\(", text):
        depth, keywords, rest = 1, [], text[found.end() :]
        for token in re.finditer(r"[()]|(\w+)=", rest):
            depth += {"(": 1, ")": -1}.get(token[0], 0)
            if depth == 0:
                break
            if token[1] and depth == 1:
                keywords.append(token[1])
        yield found[1], found[2], keywords


@pytest.mark.parametrize("page", [name for name in PAGES if "coming_from" in name])
def test_names_of_tables_exist(page):
    owners = {"jr": [jr], "buffer": [jr.ReplayBuffer, jr.SequenceBuffer], "tracer": [jr.NStep]}
    rows = [row.strip("|").split(" | ") for row in PAGES[page].splitlines() if row.startswith("|")]
    ours, seen = "\n".join(row[1] for row in rows), 0
    for place, name, keywords in calls(ours):
        found = [getattr(owner, name) for owner in owners[place] if hasattr(owner, name)]
        assert found, f"{place}.{name}"
        names = {x for function in found for x in inspect.signature(function).parameters}
        assert set(keywords) <= names, f"{place}.{name}: {keywords}"
        seen += 1
    assert seen >= 4


def anchors(page):
    """What a link may name: headings in lower case, without punctuation, with hyphens in place of blanks."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", [*PAGES, "tests/benchmarks/README.md"])
def test_links(name):
    page = (ROOT / name).read_text()
    for link in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", page)):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = (ROOT / name).parent / path if path else ROOT / name
        assert target.exists(), link
        assert not anchor or anchor in anchors(target.read_text()), link
