"""The doctor finds each fault with its cure, survives what it looks for, and leaves its own process as it was."""

import importlib
import os
import re
import subprocess
import sys
import time
from collections import namedtuple
from html.parser import HTMLParser
from importlib import metadata
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from ddp_lab import data, machine
from ddp_lab.doctor import Report, doctor
from ddp_lab.machine import Row

module = importlib.import_module("ddp_lab.doctor")  # `import ddp_lab.doctor as module` would give the function
Usage = namedtuple("Usage", "total used free")
MIB = 1 << 20


pytestmark = pytest.mark.usefixtures("plain_environment")


@pytest.fixture
def probe_is(monkeypatch):
    """Let a quick program stand for the process that tries the backends."""

    def replace(code: str) -> None:
        monkeypatch.setattr(machine, "PROBE", [sys.executable, "-I", "-S", "-c", code])

    replace("""print('found {"threads": 2, "gpus": 0, "cuda": "13.0", "gloo": "", "names": []}')""")
    return replace


@pytest.fixture(scope="module")
def real():
    return doctor()


def row_of(topic: str, report: Report | None = None) -> Row:
    [row] = [row for row in (report or doctor()).rows if row.topic == topic]
    assert bool(row.cure) == (row.status != "ok")
    return row


def run_module(**variables) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "ddp_lab.doctor"]
    return subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, timeout=120)


def test_this_machine_runs_gloo_and_has_the_sample(real):
    assert row_of("gloo", real) == Row("gloo", "works, tried with one process")
    assert row_of("sample", real).status == "ok"
    assert f"torch {metadata.version('torch')}" in row_of("versions", real).found


def test_own_process_is_left_alone(real):
    assert not dist.is_initialized()
    assert not torch.cuda.is_initialized()


def test_good_rows_name_no_folder_of_this_machine(real):
    shown = " ".join(row.found for row in real.rows if row.status == "ok")
    assert not any(str(folder) in shown for folder in (Path.home(), Path(sys.prefix), machine.REPOSITORY))


def test_import_brings_nothing_heavy():
    heavy = {"IPython", "ipywidgets", "matplotlib", "torch"}
    code = f"import sys, ddp_lab.doctor; print(sorted({heavy} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_exit_status_is_0_without_problems():
    run = run_module()
    assert run.returncode == 0, run.stdout
    assert run.stdout.splitlines()[-1].startswith("Everything works")


def test_broken_pytorch_is_a_row_with_exit_status_1_and_no_traceback(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('libtorch.so: no such file')")
    run = run_module(PYTHONPATH=str(tmp_path))
    assert (run.returncode, run.stderr) == (1, "")
    assert "does not start: ImportError: libtorch.so: no such file" in run.stdout
    assert "the first cure, for PyTorch:" in run.stdout


def test_missing_package_comes_with_its_command(probe_is, monkeypatch):
    def without_nbval(name, version=metadata.version):
        if name == "nbval":
            raise metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(metadata, "version", without_nbval)
    row = row_of("nbval")
    assert (row.status, row.found) == ("problem", "missing; the lab needs 0.11 or later")
    assert "'nbval>=0.11'" in row.cure
    assert "nbval" not in row_of("versions").found


@pytest.mark.parametrize("version, good", [("2.8.1", False), ("2.9.0+cpu", True), ("2.14.1", True), ("10.0", True)])
def test_versions_compare_as_numbers(version, good, probe_is, monkeypatch):
    monkeypatch.setattr(metadata, "version", lambda name: version if name == "torch" else "99.0")
    assert any(row.topic == "torch" for row in doctor().rows) != good


def test_requirements_are_the_declared_ones_installed_or_not(monkeypatch):
    def not_installed(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", not_installed)
    from_checkout = dict(module._requirements())
    assert {"torch", "torchvision", "jupyterlab", "ipywidgets", "matplotlib", "nbval"} <= set(from_checkout)
    declared = [f"{name}>={minimum}" for name, minimum in from_checkout.items()]
    monkeypatch.setattr(metadata, "requires", lambda name: [*declared, "pytest>=8 ; extra == 'test'"])
    assert dict(module._requirements()) == from_checkout


def test_kernel_without_the_lab_is_named(probe_is, monkeypatch):
    monkeypatch.setattr(metadata, "distributions", lambda **where: iter(()))
    row = row_of("environment")
    assert row.status == "warning"
    assert sys.executable in row.found
    assert f"{sys.executable} -m pip install -e {machine.REPOSITORY}" in row.cure


def test_full_disk_is_noticed(probe_is, monkeypatch):
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: Usage(0, 0, 199 * MIB))
    assert row_of("disk").status == "warning"


def test_missing_data_folder_is_a_problem(probe_is, monkeypatch, tmp_path):
    monkeypatch.setenv("DDP_LAB_DATA", str(tmp_path / "absent"))
    row = row_of("data")
    assert (row.status, row.cure) == ("problem", "create it or unset DDP_LAB_DATA")


def test_full_mnist_is_optional_but_never_half_there(probe_is, monkeypatch, tmp_path):
    monkeypatch.setenv("DDP_LAB_DATA", str(tmp_path))
    assert row_of("full MNIST").status == "ok"
    (tmp_path / "MNIST" / "raw").mkdir(parents=True)
    row = row_of("full MNIST")
    assert row.status == "problem"
    assert "train-images-idx3-ubyte is missing" in row.found
    assert "prepare_data(full=True)" in row.cure


def test_missing_sample_is_a_problem(probe_is, monkeypatch, tmp_path):
    monkeypatch.setattr(data, "prepare_data", lambda: tmp_path / "sample")
    row = row_of("sample")
    assert row.status == "problem"
    assert "git checkout" in row.cure


def test_damaged_sample_is_a_problem(probe_is, monkeypatch):
    def refuse(root):
        raise ValueError("t10k-labels-idx1-ubyte has 3 bytes: restore it")

    monkeypatch.setattr(data, "check_files", refuse)
    assert row_of("sample") == Row("sample", "t10k-labels-idx1-ubyte has 3 bytes", "problem", "restore it")


def test_failing_gloo_is_a_problem(probe_is):
    probe_is("""print('found {"threads": 2, "gpus": 0, "cuda": null, "gloo": "RuntimeError: no route"}')""")
    report = doctor()
    row = row_of("gloo", report)
    assert (row.status, row.found) == ("problem", "fails: RuntimeError: no route")
    assert not report.ok


def test_interrupt_ends_the_probe(probe_is, monkeypatch):
    before, started = psutil.Process().children(), []  # Python's own helpers may run already

    def interrupt():
        started.extend(child for child in psutil.Process().children() if child not in before)
        raise KeyboardInterrupt

    probe_is("import time; time.sleep(30)")
    monkeypatch.setattr(machine, "CHECKS", (interrupt,))
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        doctor()
    assert time.monotonic() - start < 20
    assert started
    assert not any(child.is_running() for child in started)


def test_check_that_breaks_hides_no_other(probe_is, monkeypatch):
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: 1 / 0)
    report = doctor()
    assert row_of("interfaces", report).found == "could not be looked at: ZeroDivisionError: division by zero"
    assert not report.ok
    assert row_of("sample", report).status == "ok"


def test_summary_counts_problems_and_gives_the_first_cure():
    good, doubtful, bad = Row("a", "x"), Row("b", "y", "warning", "do b"), Row("c", "z", "problem", "do c")
    assert Report((good,)).summary == "Everything works."
    assert Report((good, doubtful)).summary == "Everything works, with 1 warning."
    assert Report((good, doubtful, bad)).summary == "1 problem; the first cure, for c: do c"
    assert Report((bad, good, bad)).summary.startswith("2 problems")
    assert [Report(rows).ok for rows in ((good, doubtful), (good, bad))] == [True, False]


def test_text_is_aligned_and_at_most_100_columns_wide():
    rows = (Row("short", "word " * 60), Row("a longer topic", "y", "problem", "long " * 60), Row("/", "x" * 300))
    lines = repr(Report(rows)).splitlines()
    assert max(map(len, lines)) <= 100
    assert "\x1b" not in repr(Report(rows))
    assert {line.index("word") for line in lines if "word" in line} == {25}
    assert any(line.startswith(" " * 25 + "cure: long") for line in lines)
    assert str(Report(rows)) == repr(Report(rows))


class Table(HTMLParser):
    """Collect the tags, and the texts of the cells."""

    def __init__(self, text: str):
        super().__init__()
        self.tags, self.texts = [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, text):
        self.texts.append(text)


def test_html_escapes_what_it_found():
    evil = '<script>alert("1")</script> & more'
    table = Table(Report((Row(evil, evil, "problem", evil),))._repr_html_())
    assert "script" not in {tag for tag, _ in table.tags}
    assert table.texts.count(evil) == 3


def test_html_status_is_a_word_and_headers_have_a_scope():
    rows = [Row(status, "x", status, "y") for status in ("ok", "warning", "problem")]
    table = Table(Report(tuple(rows))._repr_html_())
    assert [text.strip() for text in table.texts if text.startswith(" ")] == ["ok", "warning", "problem"]
    scopes = [attributes.get("scope") for tag, attributes in table.tags if tag == "th"]
    assert scopes == ["col"] * 4 + ["row"] * 3
    colours = [part for _, attributes in table.tags for part in re.findall("color:[^;]*", attributes.get("style", ""))]
    assert colours
    assert all(re.fullmatch(r"color:(var\(--jp-[\w-]+, inherit\)|inherit)", colour) for colour in colours)
