"""The notebook, executed: `python docs/site/notebook.py` puts the outputs of this machine into docs/notebook.ipynb."""

from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[1] / "notebook.ipynb"
SECONDS = 300  # for a cell at most
NOISE = ("image/jpeg", "text/html")  # beside an image/png or text/plain that says the same


def executed(path: Path = NOTEBOOK) -> Any:
    """The notebook with what its cells print and draw; without what libraries say on stderr."""
    notebook = nbformat.read(path, 4)
    where = {"metadata": {"path": str(path.parent)}}
    NotebookClient(notebook, timeout=SECONDS, kernel_name="python3", resources=where, record_timing=False).execute()
    for cell in notebook.cells:
        cell.get("outputs", [])[:] = [_plain(one) for one in cell.get("outputs", []) if one.get("name") != "stderr"]
    return notebook


def _plain(output: Any) -> Any:
    for kind in NOISE:
        output.get("data", {}).pop(kind, None)
    return output


if __name__ == "__main__":
    nbformat.write(executed(), NOTEBOOK)
