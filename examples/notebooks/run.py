"""Run the notebooks of this folder; a cell that fails ends the run.

pip install -e '.[examples]'
python examples/notebooks/run.py           # runs them, and changes no file
python examples/notebooks/run.py --write   # also writes their outputs into them
"""

import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

for path in sorted(Path(__file__).parent.glob("*.ipynb")):
    start, notebook = time.perf_counter(), nbformat.read(path, as_version=4)
    NotebookClient(
        notebook, timeout=300, resources={"metadata": {"path": str(path.parent)}}
    ).execute()
    if "--write" in sys.argv[1:]:
        for cell in notebook.cells:
            cell.metadata.pop("execution", None)  # times, new in each run
        notebook.metadata.pop("language_info", None)  # with the version of Python
        nbformat.write(notebook, path)
    print(f"{path.name}: {time.perf_counter() - start:.0f} s")
