"""Names that people bring from other libraries: the error says what is in their place, and that exists."""

import copy
import dataclasses
import pickle
import re

import pytest

import jaxreplay as jr
from jaxreplay._common import elsewhere

BUFFERS = {
    jr.ReplayBuffer: (elsewhere.FOR_ARGUMENTS, {"capacity": 4}),
    jr.ReservoirBuffer: (elsewhere.FOR_ARGUMENTS, {"capacity": 4}),
    jr.SequenceBuffer: (
        elsewhere.FOR_ARGUMENTS_OF_SEQUENCES,
        {"length": 4, "num_envs": 1, "sequence_length": 2},
    ),
}


def check_advice(advice, owner):
    """All names in the advice exist: `jr.name`, its keyword arguments, methods and fields of `owner`."""
    for name in re.findall(r"jr\.(\w+)", advice):
        assert hasattr(jr, name), advice
    for name, arguments in re.findall(r"jr\.(\w+)\((.*?)\.\.\.", advice):
        assert arguments.rstrip("=").split(", ")[0] in getattr(jr, name).__dataclass_fields__, advice
    if not advice.startswith(("jr.", "jax.")):
        name = re.match(r"\w+", advice)[0]
        assert hasattr(owner, name) or name in owner.__dataclass_fields__, advice


@pytest.mark.parametrize("name", elsewhere.FOR_NAMES)
def test_a_name_of_another_library(name):
    advice = elsewhere.FOR_NAMES[name]
    with pytest.raises(AttributeError, match=rf"'jaxreplay' has no attribute '{name}'; use {re.escape(advice)}$"):
        getattr(jr, name)
    check_advice(advice, jr.ReplayBuffer)


@pytest.mark.parametrize("buffer", BUFFERS)
def test_arguments_and_methods_of_another_library(buffer):
    known, right = BUFFERS[buffer]
    for name, advice in known.items():
        with pytest.raises(TypeError, match=f"{buffer.__name__}: no argument '{name}'; use {re.escape(advice)}$"):
            buffer(**{name: 1})
        check_advice(advice, buffer)
    for name, advice in elsewhere.FOR_METHODS.items():
        with pytest.raises(AttributeError, match=f"has no attribute '{name}'; use {re.escape(advice)}$"):
            getattr(buffer(**right), name)
        check_advice(advice, buffer)


def test_unknown_names_stay_plain_errors():
    with pytest.raises(AttributeError, match=r"^module 'jaxreplay' has no attribute 'nothing'$"):
        jr.nothing  # noqa: B018
    with pytest.raises(AttributeError, match=r"^'ReplayBuffer' object has no attribute 'nothing'$"):
        jr.ReplayBuffer(capacity=4).nothing  # noqa: B018
    with pytest.raises(TypeError, match="unexpected keyword argument 'nothing'"):
        jr.ReplayBuffer(nothing=4)
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'capacity'"):
        jr.ReplayBuffer()


@pytest.mark.parametrize("buffer", BUFFERS)
def test_configurations_are_copied_as_before(buffer):
    made = buffer(**BUFFERS[buffer][1])
    for again in (copy.copy(made), copy.deepcopy(made), pickle.loads(pickle.dumps(made)), dataclasses.replace(made)):
        assert again == made
        assert hash(again) == hash(made)
