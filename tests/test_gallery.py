"""The gallery has every example and every recipe with its command, and small pictures that its program makes."""

import json
import pathlib
import re
import runpy

from PIL import Image

ROOT = pathlib.Path(__file__).parent.parent
FOLDER = ROOT / ".docs/pages/assets/gallery"
PAGE = (ROOT / ".docs/pages/gallery.md").read_text()
HELPERS = {"studies/experiment.py", "studies/agents.py"}
WITHOUT = {"studies/time_limit.py"}  # it prints, and draws nothing


def found(pattern, folder):
    return {str(path.relative_to(folder)) for path in folder.glob(pattern)}


def shown():
    """Programs by name, with their pictures."""
    cards = PAGE.split("\n-   **[")[1:]
    programs = [re.search(r"\]\(\.\./\.\./examples/([^)]*\.(?:py|ipynb))\)", card)[1] for card in cards]
    for card, program in zip(cards, programs, strict=True):
        command = "jupyter execute" if program.endswith(".ipynb") else "python"
        assert f"`{command} examples/{program}" in card
    pictures = [re.findall(r"!\[[^\]]+\]\(assets/gallery/([^)]*)\)", card) for card in cards]
    assert len(set(programs)) == len(programs)
    return dict(zip(programs, pictures, strict=True))


def test_captions_have_the_environment_and_the_seeds_of_the_program():
    found = re.findall(r"`python examples/((?:agents|studies)/\w+\.py)`: ([^,]+,.*?) ?(\d+)&nbsp;seeds, (.+)\n", PAGE)
    assert {program for program, *_ in found} == {x for x in shown() if x.startswith(("agents/", "studies/"))}
    for program, environment, seeds, times in found:
        source = (ROOT / "examples" / program).read_text()
        default = re.search(r'"--seeds", type=int, default=(\d+)|Parser\([^)]*, seeds=(\d+)', source)[0]
        assert default.endswith(f"={seeds}"), program
        assert environment
        assert re.fullmatch(r"\d+&nbsp;s|minutes", times)


def test_every_notebook_example_and_recipe_is_shown():
    patterns = "*.py", "agents/*.py", "studies/*.py", "recipes/*.py", "*/*.ipynb"
    programs = set().union(*(found(pattern, ROOT / "examples") for pattern in patterns))
    assert shown().keys() == programs - HELPERS


def test_every_picture_is_shown_where_it_belongs_and_is_small():
    for program, pictures in shown().items():
        assert pictures == ([] if program in WITHOUT else [str(pathlib.PurePath(program).with_suffix(".png"))])
    assert {x for pictures in shown().values() for x in pictures} == found("**/*.png", FOLDER)
    for path in FOLDER.glob("**/*.png"):
        assert path.stat().st_size < 60_000
        with Image.open(path) as picture:
            assert picture.width == 640


def test_the_program_makes_every_picture():
    all_names = runpy.run_path(ROOT / ".docs/gallery.py")["all_names"]
    assert {*all_names()} == {program for program, pictures in shown().items() if pictures}


def test_notebooks_are_small_and_were_run():
    for path in (ROOT / "examples/notebooks").glob("*.ipynb"):
        assert path.stat().st_size < 200_000
        cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
        assert [cell["execution_count"] for cell in cells] == [*range(1, len(cells) + 1)]
        outputs = [output for cell in cells for output in cell["outputs"]]
        assert any("image/png" in output.get("data", {}) for output in outputs)
        assert not any(output.get("name") == "stderr" or output["output_type"] == "error" for output in outputs)
