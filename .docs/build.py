"""Build the site into build/docs/site: `python .docs/build.py` (with the extra `docs`).

Pages are plain Markdown with relative links, so that they also read well on a code host. For the site they are gathered
in build/docs/pages:

- A file outside of `pages` that a page links to comes along: a program or a notebook as a page, others as they are.
- A link marked `<!-- included -->` becomes what it leads to: a section of a page, or a program without its docstring.
- A name in code, such as `jr.NStep`, becomes a link to its entry in the reference.
- Of a private module, `::: jaxreplay.buffers._replay`, the reference has the docstring alone.
- A page of the reference says where its examples start.
- A folder in the navigation becomes all of its pages.

Then the site is built, where every warning is an error, and every link and every public name is looked up in it.
"""

import functools
import html
import json
import os
import pathlib
import posixpath
import re
import shutil
import subprocess
import sys

import search

ROOT = pathlib.Path(__file__).parent.parent
PAGES = ".docs/pages/"
OUT = ROOT / "build/docs"
FENCE = re.compile(r"^(```.*?^```)$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:|data:)([^)\s#]*)(#[^)\s]*)?\)")
INCLUDED = re.compile(r"^\[[^\]]*\]\(([^)\s#]+)(?:#([^)\s]+))?\) <!-- included -->$", re.MULTILINE)
DOCSTRING = re.compile(r'\A""".*?"""\n+', re.DOTALL)
NAMED = re.compile(r"(^#.*|!?\[[^\]]*\]\([^)]*\))|`jr\.([\w.]+)[^`]*`", re.MULTILINE)
NOT_SEARCHED = "---\nsearch:\n  exclude: true\nhide: [navigation, toc]\n---\n"  # with room for 120 columns
BOOSTS = {  # of pages in the search, the first that fits: what answers a question is before what lists names
    "guides/authors": 0.5,
    "reference/authors": 0.25,
    "reference/": 0.5,
    "faq": 2,
    "buffers": 2,
    "guides/": 2,
    "benchmark": 0.25,
    "changelog": 0.25,
    "contributing": 0.25,
    "examples/": 0.25,
}
HEAD = re.compile(r"^::: jaxreplay\.(\S+\._\w+|curricula\.scores)$", re.MULTILINE)
OF_HEAD = r"\g<0>\n    options: {members: [], show_root_heading: false, show_root_toc_entry: false}"
EXAMPLES = "\nExamples start after [these lines](index.md)."
ENTRY = re.compile(r"^::: jaxreplay\.(\S+)$", re.MULTILINE)
MOVED = {  # where a file of the repository, or a section of it, is in the site, if not under its own name
    "README.md": "index.md",
    "examples/README.md": "programs.md",
    "tests/benchmarks/README.md": "benchmark.md",
    ".github/CHANGELOG.md": "changelog.md",
    ".github/CONTRIBUTING.md": "contributing.md",
}


def place_of(path: str, anchor: str = "") -> str:
    """Where `path`, a file of the repository, is in the site; with the anchor."""
    if path + anchor in MOVED:
        return MOVED[path + anchor]
    page = re.sub(r"\.(py|ipynb)$", ".md", path.removeprefix(PAGES))
    return MOVED.get(path, page) + anchor


def notebook(text: str) -> str:
    """A notebook as a page: its text, its code, and the outputs that it was saved with."""
    parts = []
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        parts.append(f"```python\n{source}\n```" if cell["cell_type"] == "code" else source)
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if "image/png" in data:
                parts.append(f"![Output](data:image/png;base64,{''.join(data['image/png'].split())})")
            else:
                parts.append(f"```text\n{''.join(output.get('text') or data['text/plain']).rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


@functools.cache
def text_of(path: str) -> str:
    text = (ROOT / path).read_text()
    if path.endswith(".ipynb"):
        return notebook(text)
    return f"# {path}\n\n```python\n{text}```\n" if path.endswith(".py") else text


def is_searched(path: str) -> bool:
    """Whether a page is for the site's search: not programs, and not tables of figures."""
    return path.endswith(".md") and "/results/" not in path


def searched(path: str) -> str:
    """How the search takes a page: its front matter, where there is something to say."""
    if not is_searched(path):
        return NOT_SEARCHED
    boost = next((boost for start, boost in BOOSTS.items() if place_of(path).startswith(start)), None)
    return f"---\nsearch:\n  boost: {boost}\n---\n" if boost else ""


def resolved(path: str, base: str) -> str:
    """The file of the repository that `path` is, in a link of the page `base`; the page itself if it is empty."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(base), path)) if path else base


def included(path: str, anchor: str | None) -> str:
    """What stands under a heading of a page; a program's code."""
    if path.endswith(".py"):
        return f"```python title='{path}'\n{DOCSTRING.sub('', (ROOT / path).read_text())}```"
    page = FENCE.sub(lambda code: code[0].replace("\n#", "\n\0#"), text_of(path))  # comments are no headings
    for part in re.split(r"^#+ ", page, flags=re.MULTILINE):
        heading, _, text = part.partition("\n")
        if re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") == anchor:
            return text.replace("\0", "")
    raise SystemExit(f"{path} has no section {anchor}")


def sources(path: str) -> list[tuple[str, str]]:
    """Parts of a page, its fences apart, each with the page that its links start from."""
    parts, end, text = [], 0, text_of(path)
    for found in INCLUDED.finditer(text):
        other = resolved(found[1], path)
        parts += [(path, text[end : found.start()]), (other, included(other, found[2]))]
        end = found.end()
    parts.append((path, text[end:]))
    return [(base, part) for base, text in parts for part in FENCE.split(text)]


def links(path: str) -> set[str]:
    """The files of the repository that a page links to."""
    parts = [(base, part) for base, part in sources(path) if not part.startswith("```")]
    return {resolved(link[1], base) for base, part in parts for link in LINK.finditer(part)}


def gathered() -> set[str]:
    """All files of the site: the pages, those that are moved there, and what these link to in turn."""
    pages = {str(x.relative_to(ROOT)) for x in (ROOT / PAGES).rglob("*") if x.is_file()}
    waiting = pages | {path for path in MOVED if "#" not in path} - {"README.md"}
    found = set()
    while waiting:
        found.add(path := waiting.pop())
        if path.endswith((".md", ".ipynb")):
            linked = links(path)
            if missing := [link for link in linked if not (ROOT / link).is_file()]:
                raise SystemExit(f"{path} links to {', '.join(missing)}: no file of the repository")
            waiting |= linked - found - {"README.md"}
    return found


def reference() -> dict[str, str]:
    """The page of every public name."""
    pages = sorted((ROOT / PAGES / "reference").glob("*.md"))
    return {name: f"reference/{page.name}" for page in pages for name in ENTRY.findall(page.read_text())}


def staged(path: str, entries: dict[str, str]) -> str:
    """A page as the site's builder takes it."""
    here = posixpath.dirname(place_of(path)) or "."

    def link(base, found):
        if not found[1]:
            return found[0]
        place, _, anchor = place_of(resolved(found[1], base), found[2] or "").partition("#")
        return f"]({posixpath.relpath(place, here)}{'#' + anchor if anchor else ''})"

    def name(found):
        entry = next((x for x in (found[2], (found[2] or "").rpartition(".")[0]) if x in entries), None)
        if entry is None:
            return found[0]
        return f"[{found[0]}]({posixpath.relpath(entries[entry], here)}#jaxreplay.{found[2]})"

    text = ""
    for base, part in sources(path):
        if not part.startswith("```"):
            part = LINK.sub(functools.partial(link, base), part)
            part = part if place_of(path) in entries.values() else NAMED.sub(name, part)
        text += part
    if place_of(path) in entries.values():
        text = text.replace("\n", f"\n{EXAMPLES}\n", 1)
    return HEAD.sub(OF_HEAD, text)


def stage() -> None:
    shutil.rmtree(OUT, ignore_errors=True)
    entries = reference()
    for path in gathered():
        target = OUT / "pages" / place_of(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.endswith((".md", ".py", ".ipynb")):
            target.write_text(searched(path) + staged(path, entries))
        else:
            shutil.copyfile(ROOT / path, target)

    def pages_of(found):
        pages = sorted((OUT / "pages" / found[2]).glob("*.md"), key=lambda x: (x.name != "index.md", x.name))
        lines = [f"\n      - {found[2]}{page.name}" for page in pages]
        return f"  - {found[1]}:{''.join(lines)}\n" if lines else ""

    settings = (ROOT / ".docs/mkdocs.yml").read_text()
    settings = re.sub(r"^  - (.*): (\w+/)( #.*)?\n", pages_of, settings, flags=re.MULTILINE)
    (OUT / "mkdocs.yml").write_text(settings)


def check() -> list[str]:
    """What is wrong with the site: public names without an entry in the reference, and links that lead nowhere."""
    site = OUT / "site"
    pages = {page: page.read_text() for page in site.rglob("*.html")}
    ids = {page: {html.unescape(x) for x in re.findall(r'\bid="([^"]+)"', text)} for page, text in pages.items()}
    entries = {x for page, found in ids.items() if page.is_relative_to(site / "reference") for x in found}
    listed = re.search(r"__all__ = \[.*?\n(.*?)\n\]", (ROOT / "jaxreplay/__init__.py").read_text(), re.DOTALL)
    modules = {path.stem for path in (ROOT / "jaxreplay").iterdir()} | {"scores"}
    public = [name for name in re.findall(r'"(\w+)"', listed[1]) if name not in modules]
    wrong = [f"{name}: no entry in the reference" for name in public if f"jaxreplay.{name}" not in entries]
    for page, text in pages.items():
        for address in re.findall(r'\b(?:href|src)="([^"]*)"', text):
            path, _, anchor = html.unescape(address).partition("#")
            if re.match(r"https?:|data:|/", path) and page.name != "404.html":
                if not address.startswith(("https://", "data:image/")):
                    wrong.append(f"{page.relative_to(site)}: {address}")
                continue
            target = (page.parent / path.partition("?")[0]).resolve() if path else page
            target = target / "index.html" if target.is_dir() else target
            there = target.exists() and (not anchor or anchor in ids.get(target, {anchor}))
            if not there and page.name != "404.html":
                wrong.append(f"{page.relative_to(site)}: {address}")
    return sorted(set(wrong))


def main() -> None:
    stage()
    # Not `--quiet`: with it warnings are not counted, and none is an error.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(OUT / "mkdocs.yml")]
    quiet = {"cwd": ROOT, "env": {**os.environ, "NO_MKDOCS_2_WARNING": "1"}, "capture_output": True, "text": True}
    built = subprocess.run(command, **quiet)
    if built.returncode:
        raise SystemExit(built.stdout + built.stderr)
    if wrong := check() + search.check(OUT / "site"):
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    main()
