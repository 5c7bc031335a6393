"""What every saved lesson keeps to; nbval runs the cells themselves."""

import re
from pathlib import Path
from statistics import median

import nbformat
import pytest

FOLDER = Path(__file__).parent.parent / "notebooks"
LESSONS = sorted(FOLDER.glob("*.ipynb"))
MACHINE = re.compile(r"/(home|root|work|tmp|usr|opt|Users)/|site-packages|\bat 0x[0-9a-f]{6,}|\x1b\[")
LINK = re.compile(r"\]\(([^)]+)\)")

lessons = pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)


def read(path):
    return nbformat.read(path, as_version=4)


def cells(path, kind):
    return [cell for cell in read(path).cells if cell.cell_type == kind]


def test_there_are_lessons():
    assert [path.stem[:2] for path in LESSONS][:2] == ["00", "01"]


@lessons
def test_every_code_cell_was_run_in_order(path):
    counts = [cell.execution_count for cell in cells(path, "code")]
    assert counts == list(range(1, len(counts) + 1))


@lessons
def test_only_cells_that_say_so_raise(path):
    for cell in cells(path, "code"):
        raised = any(output.output_type == "error" for output in cell.outputs)
        assert raised == ("raises-exception" in cell.metadata.get("tags", [])), cell.source


@lessons
def test_no_widget_state_no_paths_no_colour_codes(path):
    notebook = read(path)
    assert "widgets" not in notebook.metadata
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            text = str(
                {kind: data for kind, data in output.get("data", output).items() if not kind.startswith("image")}
            )
            assert not MACHINE.search(text), text
            assert "application/vnd.jupyter.widget-view+json" not in output.get("data", {})
            assert output.get("name") != "stderr"


@lessons
def test_a_lesson_is_at_most_200_kb(path):
    assert path.stat().st_size <= 200_000


@lessons
def test_every_picture_has_a_text(path):
    for cell in cells(path, "code"):
        for output in cell.outputs:
            if "image/png" in output.get("data", {}):
                assert output.metadata["image/png"]["alt"] and output.data["text/plain"]


@lessons
def test_the_shape_of_a_lesson(path):
    texts = [cell.source for cell in cells(path, "markdown")]
    codes = [cell.source for cell in cells(path, "code")]
    assert [line for text in texts for line in text.splitlines() if line.startswith("# ")] == [texts[0].splitlines()[0]]
    assert sum(text.count("\n## ") + text.startswith("## ") for text in texts) >= 3
    assert 15 <= len(codes) <= 30
    assert 1 <= len(texts) / len(codes) <= 1.6
    assert median(len(code.splitlines()) for code in codes) <= 6
    assert max(len(code.splitlines()) for code in codes) <= 25
    assert sum(len(text.split()) for text in texts) <= 1500
    assert sum(len(re.findall(r"\blaunch\(|mp\.spawn\(", code)) for code in codes) <= 10
    assert sum("**Predict.**" in text for text in texts) >= 3 and sum("**Exercise**" in text for text in texts) >= 3


@lessons
def test_links_to_other_files_work(path):
    for text in (cell.source for cell in cells(path, "markdown")):
        for target in LINK.findall(text):
            assert target.startswith("https://") or (path.parent / target.split("#")[0]).exists(), target


@lessons
def test_the_kernel_is_the_one_of_the_environment(path):
    assert read(path).metadata.kernelspec.name == "python3"
