"""What `import jaxreplay` brings along, and annotations that need no more than that."""

import inspect
import json
import subprocess
import sys
import typing

import pytest

import jaxreplay as jr

CLASSES = {name: value for name, value in vars(jr).items() if inspect.isclass(value)}


def test_neither_chex_nor_optax_is_imported():
    program = "import json, sys, jaxreplay; print(json.dumps([*sys.modules]))"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    modules = set(json.loads(found.stdout))
    assert {"jaxreplay", "jax", "flax"} <= modules
    assert not {"chex", "optax"} & modules


@pytest.mark.parametrize("name", CLASSES)
def test_type_hints_of_public_classes_and_their_methods(name):
    cls = CLASSES[name]
    typing.get_type_hints(cls)
    methods = [value for name, value in inspect.getmembers(cls, inspect.isfunction) if not name.startswith("_")]
    for method in methods:
        typing.get_type_hints(method)
