"""Run notebooks from top to bottom and save them with their outputs: `python notebooks/save_outputs.py [NOTEBOOK ...]`.

What is saved is the same on every machine as far as the lesson allows: no widget state, no times, no error output
(ranks that PyTorch's own launcher started write paths to it), and no colour codes in errors.
"""

import re
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parent
COLOUR_CODE = re.compile(r"\x1b\[[0-9;]*m")
METADATA = {
    "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def run(path: Path) -> float:
    """Run one notebook in place; return the seconds it took. Raises CellExecutionError for a failing cell."""
    notebook = nbformat.read(path, as_version=4)
    started = time.monotonic()
    client = NotebookClient(
        notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(FOLDER)}}, record_timing=False
    )
    client.store_widget_state = False
    client.execute()
    seconds = time.monotonic() - started
    clean(notebook)
    nbformat.write(notebook, path)
    return seconds


def clean(notebook) -> None:
    """Remove what differs from machine to machine and says nothing."""
    notebook.metadata = nbformat.from_dict(METADATA)
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        cell.metadata.pop("execution", None)
        cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
        for output in cell.outputs:
            if output.output_type == "error":
                output.traceback = [COLOUR_CODE.sub("", line) for line in output.traceback]


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:] or sorted(map(str, FOLDER.glob("*.ipynb")))):
        print(f"{path.name}: {run(path):.0f} s")
