"""Every public callable has a docstring with an example, and every example gives the result that it shows.

Each example starts after the lines of the package's docstring, run anew. Methods of `Sharded` and `Mixture` need a
docstring but no example: their docstrings say what differs from the method of the buffer, which has the example.
"""

import ast
import doctest
import inspect
import pathlib
import re

import pytest
from helpers import rarely

import jaxreplay as jr
from jaxreplay import buffers, curricula, datasets, samplers, scores, sum_tree, testing, transitions, wrappers

START = "".join(example.source for example in doctest.DocTestParser().get_examples(jr.__doc__))  # of every example


def exported(module):
    """What a module lists in `__all__`, else what it defines, or imports as the same name (`x as x`), without a `_`."""
    names = list(getattr(module, "__all__", ()))
    for node in () if names else ast.parse(pathlib.Path(module.__file__).read_text()).body:
        if isinstance(node, ast.ImportFrom):
            names += [alias.name for alias in node.names if alias.asname == alias.name]
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.append(node.name)
    return {name: getattr(module, name) for name in names if not name.startswith("_")}


def methods(cls):
    """The public methods of a class that are not from another package."""
    found = {name: getattr(cls, name) for name in dir(cls) if not name.startswith("_")}
    return {
        name: method
        for name, method in found.items()
        if callable(method) and str(getattr(method, "__module__", "")).startswith("jaxreplay")
    }


def documented(cls, name):
    """The method whose docstring is that of a class's method: its own, or an inherited one."""
    for base in cls.__mro__:
        method = base.__dict__.get(name)
        if method is not None and inspect.unwrap(getattr(method, "__func__", method)).__doc__:
            return f"{base.__name__}.{name}", getattr(base, name)
    return f"{cls.__name__}.{name}", getattr(cls, name)


def public_callables():
    """By the name of what holds the docstring, so that an inherited one is there once."""
    found = {}
    modules = buffers, samplers, transitions, wrappers, curricula, scores, sum_tree, datasets, testing
    for prefix, module in (("", jr), *((f"{module.__name__.rpartition('.')[2]}.", module) for module in modules)):
        for name, value in exported(module).items():
            if inspect.ismodule(value) or any(value is other for other in found.values()):
                continue
            found[prefix + name] = value
            if inspect.isclass(value):
                found |= dict(documented(value, method) for method in methods(value))
    return found


CALLABLES = public_callables()
WITHOUT_EXAMPLE = [name for name in CALLABLES if name.startswith(("Sharded.", "Mixture."))]
WITH_EXAMPLE = [name for name in CALLABLES if name not in WITHOUT_EXAMPLE]


def test_all_public_callables_are_found():
    assert {"ReplayBuffer", "ReplayBuffer.add", "Buffer.sample", "Mixture.sample", "Sharded.update"} <= CALLABLES.keys()
    assert {"Sampler.insert", "NStep.add", "sum_tree.find", "datasets.from_arrays", "Steps.padded"} <= CALLABLES.keys()
    assert {"Buffer.newest", "TransitionBatch.from_single", "plot", "diagnostics"} <= CALLABLES.keys()
    assert not {"Prioritized.insert", "ReplayBuffer.sample", "datasets.make_steps"} & CALLABLES.keys()
    assert "Index.write" in {name.removeprefix("samplers.") for name in CALLABLES}
    assert {"Sharded", "Mixture"} <= set(WITH_EXAMPLE)
    assert len(WITHOUT_EXAMPLE) == 36
    assert len(WITH_EXAMPLE) >= 116


def test_methods_of_a_sampler_have_the_docstrings_of_the_protocol():
    for sampler in (jr.Uniform, jr.Prioritized):
        for name in ("init", "insert", "sample", "restrict", "weights", "update"):
            assert inspect.getdoc(getattr(sampler, name)) == inspect.getdoc(getattr(jr.samplers.Sampler, name))


def run(docstring, name):
    """What the examples of a docstring print, where it is not what they show."""
    exec(START, names := {})
    test = doctest.DocTestParser().get_doctest(docstring, names, name, name, 0)
    wrong = []
    doctest.DocTestRunner(verbose=False).run(test, out=wrong.append)
    return "".join(wrong)


DEAR = {"plot", "migrate", "MonteCarlo", "SequenceBuffer.later"}
DEAR |= {"testing.check_buffer", "testing.check_sampler", "datasets.from_minari", "hindsight", "restore"}
DEAR |= {"DifficultyPools.recycle", "DifficultyPools.remap", "DifficultyPools", "Sharded", "ReservoirBuffer"}
CASES = [rarely(name) if name in DEAR else name for name in WITH_EXAMPLE]


@pytest.mark.parametrize("name", WITHOUT_EXAMPLE)
def test_there_is_a_docstring(name):
    assert inspect.unwrap(CALLABLES[name]).__doc__, f"{name}: no docstring"


@pytest.mark.parametrize("name", WITH_EXAMPLE)
def test_there_is_an_example(name):
    """Of 88 columns, as in the pages, where the site shows no more; a message of an error is one line."""
    docstring = inspect.getdoc(CALLABLES[name])
    assert docstring, f"{name}: no docstring"
    sections = re.findall(r"^(Args|Returns|Raises|Attributes|Examples):$", docstring, re.MULTILINE)
    assert sections[-1:] == ["Examples"], f"{name}: its docstring does not end with examples"
    examples = doctest.DocTestParser().get_examples(docstring.partition("\nExamples:\n")[2])
    assert any(example.want or example.exc_msg for example in examples) or name == "save", f"{name}: shows no result"
    for example in examples:
        assert max(len(line) + 4 for line in example.source.splitlines()) <= 88, example.source
        assert example.exc_msg or max((len(line) for line in example.want.splitlines()), default=0) <= 88, example.want


@pytest.mark.filterwarnings("ignore::UserWarning:minari")  # of what describes a data set and is left out
@pytest.mark.parametrize("name", CASES)
def test_example(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    assert not (wrong := run(inspect.getdoc(CALLABLES[name]), name)), wrong


def test_a_wrong_example_is_noticed():
    assert run(">>> 1 + 1\n2", "right") == ""
    assert "Expected" in run(">>> 1 + 1\n3", "wrong")
    assert "ZeroDivisionError" in run(">>> 1 / 0", "raises")
