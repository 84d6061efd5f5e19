"""Names that people bring from other libraries: the error says what is in their place, and that exists."""

import re

import pytest

import jaxreplay as jr
from jaxreplay._common import foreign_names


def check_advice(advice):
    """All names in the advice exist: `jr.name`, and its keyword arguments."""
    for name in re.findall(r"jr\.(\w+)", advice):
        assert hasattr(jr, name), advice
    for name, arguments in re.findall(r"jr\.(\w+)\((.*?)\.\.\.", advice):
        assert arguments.rstrip("=").split(", ")[0] in getattr(jr, name).__dataclass_fields__, advice


@pytest.mark.parametrize("name", foreign_names.FOR_NAMES)
def test_a_name_of_another_library(name):
    advice = foreign_names.FOR_NAMES[name]
    with pytest.raises(AttributeError, match=rf"'jaxreplay' has no attribute '{name}'; use {re.escape(advice)}$"):
        getattr(jr, name)
    check_advice(advice)


def test_an_unknown_name_stays_a_plain_error():
    with pytest.raises(AttributeError, match=r"^module 'jaxreplay' has no attribute 'nothing'$"):
        jr.nothing  # noqa: B018 (to read it is what raises)
