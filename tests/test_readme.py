"""The README's code runs, its links lead somewhere, and its commands exist."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_example_runs_as_it_stands(tmp_path):
    [example] = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    script = tmp_path / "example.py"
    script.write_text(f"{example}\nprint(len(run.log.series('loss', 1)[1]), run.results[0].shape, run)\n")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert done.stdout == "200 torch.Size([1, 8]) Run(2 ranks, finished)\n", done.stderr


@pytest.mark.parametrize("document", ["README.md", "data/README.md", "benchmarks/README.md"])
def test_links_lead_somewhere(document):
    folder = (ROOT / document).parent
    for target in re.findall(r"\]\(([^)]+)\)", (ROOT / document).read_text()):
        assert target.startswith("https://") or (folder / target).exists(), target


def test_every_lesson_is_in_the_table():
    listed = set(re.findall(r"\(notebooks/(\d\d_\w+\.ipynb)\)", README))
    assert listed == {path.name for path in (ROOT / "notebooks").glob("*.ipynb")}


def test_the_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"`?\bmake (\w+)", README)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
