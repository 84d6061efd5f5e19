"""What a release says of itself is said alike everywhere."""

import pathlib
import re
import tomllib

import jaxreplay as jr

ROOT = pathlib.Path(__file__).parent.parent


def text(path):
    return (ROOT / path).read_text()


def test_version_changelog_and_citation_agree():
    assert re.search(r"^version: (.*)$", text(".github/CITATION.cff"), re.MULTILINE)[1] == jr.__version__
    assert re.search(r"^## (\S+)", text(".github/CHANGELOG.md"), re.MULTILINE)[1] == jr.__version__
    project, release = tomllib.loads(text("pyproject.toml")), text(".github/workflows/release.yml")
    version = project["tool"]["hatch"]["version"]["path"]
    assert f'__version__ = "{jr.__version__}"\n' in text(version)
    assert version in release


def test_supported_pythons_agree():
    classified = re.findall(r"Python :: (3\.\d+)", text("pyproject.toml"))
    for workflow in ("ci", "release"):
        tested = re.findall(r'"(3\.\d+)"', text(f".github/workflows/{workflow}.yml"))
        assert set(classified) == set(tested), workflow
    first, last = classified[0], classified[-1]
    for page in ("README.md", ".docs/pages/index.md", ".github/CONTRIBUTING.md"):
        assert re.search(rf"Python\s+{first} to\s+{last}", text(page)), page
    assert f'requires-python = ">={first}"' in text("pyproject.toml")
