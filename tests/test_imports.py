"""What `import jaxreplay` brings along, and annotations that need no more than that."""

import ast
import collections
import graphlib
import importlib
import inspect
import json
import pathlib
import re
import subprocess
import sys
import typing

import pytest

import jaxreplay as jr

MODULES = jr, jr.buffers, jr.samplers, jr.transitions, jr.wrappers, jr.curricula, jr.scores, jr.sum_tree, jr.datasets
CLASSES = {name: value for module in MODULES for name, value in vars(module).items() if inspect.isclass(value)}


def test_what_is_imported():
    """Beyond jax and `flax.struct` nothing but modules of this package and of jax, so that a program starts soon."""
    program = """import json, sys, jax, flax.struct
before = [*sys.modules]
import jaxreplay
print(json.dumps([before, [*sys.modules]]))"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    before, modules = map(set, json.loads(found.stdout))
    assert {name.split(".")[0] for name in modules - before} - {"jax"} == {"jaxreplay"}
    assert not {"chex", "optax", "orbax", "matplotlib"} & modules
    assert not {"jaxreplay.checkpoint", "jaxreplay.testing"} & modules, "imported when they are used"


def test_imports_run_one_way():
    """Between the folders of the package, its own head among them, also where they are for types or delayed."""
    imports, root = collections.defaultdict(set), pathlib.Path(jr.__file__).parent
    for path in root.rglob("*.py"):
        folder = path.relative_to(root).parts[0]
        for node in ast.walk(ast.parse(path.read_text())):
            names = [x.name for x in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{name}" for name in names]
            for name in names:
                if name.split(".")[0] == "jaxreplay":
                    of = ".".join(name.split(".")[1:2]) or "__init__.py"
                    imports[folder].add(of if (root / of).is_dir() else "__init__.py")
    imports = {folder: found - {folder} for folder, found in imports.items()}
    assert imports["checkpoint"] >= {"buffers", "_common"}
    assert not imports["_common"]
    assert [*graphlib.TopologicalSorter(imports).static_order()][-1] in ("__init__.py", "__main__.py")


def test_the_public_names():
    importlib.import_module("jaxreplay.curricula")  # then an attribute, and yet no public name
    assert dir(jr) == sorted(jr.__all__)
    assert len(jr.__all__) <= 48
    assert len({name.lower() for name in jr.__all__}) == len(jr.__all__), "names that differ by case alone"
    table = jr.__doc__.split("\n\n")[1]
    assert sorted(re.findall(r"^\| (\w+) \|", table, re.MULTILINE)[1:]) == dir(jr)
    for name in jr.__all__:
        getattr(jr, name)


@pytest.mark.parametrize("name", CLASSES)
def test_type_hints_of_public_classes_and_their_methods(name):
    cls = CLASSES[name]
    typing.get_type_hints(cls)
    methods = [value for name, value in inspect.getmembers(cls, inspect.isfunction) if not name.startswith("_")]
    for method in methods:
        typing.get_type_hints(method)
