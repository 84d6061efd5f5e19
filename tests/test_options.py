"""An option is declared in at most two folders of the package; `.github/CONTRIBUTING.md` says why."""

import ast
import collections
import pathlib

import jaxreplay as jr

ROOT = pathlib.Path(jr.__file__).parent
# What a call is about, and what the shards of a buffer share: no options.
SUBJECTS = {"state", "key", "items", "indices", "slots", "values", "mask", "ends", "td_errors", "buffer", "path"}
SUBJECTS |= {"batch_size", "n", "capacity", "beta", "gamma", "axis_name"}


def is_dataclass(decorator):
    return any(x in ast.unparse(decorator) for x in ("dataclasses.dataclass", "checks.config"))


def has_default(value):
    is_rule = isinstance(value, ast.Call) and ast.unparse(value.func) == "checks.field"
    return value is not None and not (is_rule and not any(x.arg == "default" for x in value.keywords))


def options(tree):
    """Names of parameters and fields with a default, if they are given by name, and names that `getattr` asks for."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            positional, defaults = node.args.posonlyargs + node.args.args, node.args.defaults
            given = [x for x in positional[len(positional) - len(defaults) :] if x not in node.args.posonlyargs]
            given += [x for x, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True) if default]
            yield from (x.arg for x in given)
        elif isinstance(node, ast.ClassDef) and any(map(is_dataclass, node.decorator_list)):
            fields = [x for x in node.body if isinstance(x, ast.AnnAssign) and has_default(x.value)]
            yield from (x.target.id for x in fields if "ClassVar" not in ast.unparse(x.annotation))
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr"):
            yield from (x.value for x in node.args[1:2] if isinstance(x, ast.Constant))


def declared(files):
    """The folders that declare each option, from texts by path."""
    homes = collections.defaultdict(set)
    for path, text in files.items():
        for name in {*options(ast.parse(text))} - SUBJECTS:
            homes[name].add(path.parts[0])
    return homes


def test_an_option_has_at_most_two_homes():
    files = {path.relative_to(ROOT): path.read_text() for path in ROOT.rglob("*.py") if path.parent.name != "testing"}
    homes = declared(files)
    assert {name: folders for name, folders in homes.items() if len(folders) > 2} == {}
    assert homes["max_age"] == {"buffers", "wrappers"}
    assert homes["max_uses"] == {"buffers"}
    assert homes["alpha"] == {"samplers"}
    assert len(homes) > 100


def test_options_are_found():
    text = """
@dataclasses.dataclass(frozen=True)
class Config:
    field: int = 1
    other: ClassVar = 2
    without: int

    def method(self, required, unnamed=0, /, named=1, *, keyword=None, needed, mask=None):
        return getattr(self, "asked", None)
"""
    found = "field", "named", "keyword", "asked"
    assert declared({pathlib.Path("a/b.py"): text}) == {name: {"a"} for name in found}
