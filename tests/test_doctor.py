"""The doctor finds each fault with its cure, survives what it looks for, and leaves its own process as it was."""

import importlib
import os
import re
import socket
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

from ddp_lab import data
from ddp_lab.doctor import Report, Row, doctor

module = importlib.import_module("ddp_lab.doctor")  # `import ddp_lab.doctor as module` would give the function
Usage = namedtuple("Usage", "total used free")
Memory = namedtuple("Memory", "available")
MIB = 1 << 20


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in list(os.environ):
        if any(re.fullmatch(pattern, name) for pattern in module.EFFECTS):
            monkeypatch.delenv(name)


@pytest.fixture
def probe_is(monkeypatch):
    """Let a quick program stand for the process that tries the backends."""

    def replace(code: str) -> None:
        monkeypatch.setattr(module, "PROBE", [sys.executable, "-I", "-S", "-c", code])

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
    assert not any(str(folder) in shown for folder in (Path.home(), Path(sys.prefix), module.REPOSITORY))


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


def test_conda_is_not_told_to_use_pip(tmp_path, monkeypatch):
    (tmp_path / "conda-meta").mkdir()
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert module._install("torch>=2.9").startswith("conda env update -f ")


def test_kernel_without_the_lab_is_named(probe_is, monkeypatch):
    monkeypatch.setattr(metadata, "distributions", lambda **where: iter(()))
    row = row_of("environment")
    assert row.status == "warning"
    assert sys.executable in row.found
    assert f"{sys.executable} -m pip install -e {module.REPOSITORY}" in row.cure


@pytest.mark.parametrize(
    "name, value, status",
    [
        ("CUDA_VISIBLE_DEVICES", "", "warning"),
        ("CUDA_VISIBLE_DEVICES", "-1", "warning"),
        ("CUDA_VISIBLE_DEVICES", "1,0", "ok"),
        ("DDP_LAB_DATA", str(module.REPOSITORY / "data"), "ok"),
        ("GLOO_SOCKET_IFNAME", "no-such0", "problem"),
        ("GLOO_SOCKET_IFNAME", f"{module.LOOPBACK},no-such0", "problem"),
        ("GLOO_SOCKET_IFNAME", module.LOOPBACK, "ok"),
        ("MASTER_ADDR", "10.0.0.1", "warning"),
        ("MASTER_PORT", "29500", "warning"),
        ("NCCL_DEBUG", "INFO", "ok"),
        ("NCCL_P2P_DISABLE", "1", "warning"),
        ("NCCL_P2P_DISABLE", "0", "ok"),
        ("NCCL_SOCKET_IFNAME", "no-such", "warning"),
        ("NCCL_SOCKET_IFNAME", "=" + module.LOOPBACK, "ok"),
        ("NCCL_SOCKET_IFNAME", "^no-such", "ok"),
        ("OMP_NUM_THREADS", "1", "ok"),
        ("OMP_NUM_THREADS", "100000", "warning"),
        ("OMP_NUM_THREADS", "0", "problem"),
        ("OMP_NUM_THREADS", "2,1", "problem"),
        ("RANK", "0", "warning"),
        ("LOCAL_WORLD_SIZE", "2", "warning"),
        ("TORCHELASTIC_RUN_ID", "none", "warning"),
        ("TORCH_DISTRIBUTED_DEBUG", "DETAIL", "warning"),
        ("TORCH_DISTRIBUTED_DEBUG", "info", "ok"),
        ("TORCH_DISTRIBUTED_DEBUG", "yes", "problem"),
        ("TORCH_NCCL_BLOCKING_WAIT", "1", "ok"),
    ],
)
def test_variable_is_shown_with_what_it_does(name, value, status, probe_is, monkeypatch):
    assert row_of("variables").status == "ok"
    monkeypatch.setenv(name, value)
    row = row_of(name)
    assert row.status == status
    assert row.found.startswith(f"'{value[:40]}")
    assert len(row.found.split("': ")[1]) > 10


def test_pytorch_refuses_the_debug_level_that_is_called_a_problem():
    code = "import torch.distributed"
    run = subprocess.run([sys.executable, "-c", code], env=os.environ | {"TORCH_DISTRIBUTED_DEBUG": "yes"})
    assert run.returncode != 0


@pytest.mark.parametrize("limit, status", [("max 100000", "ok"), ("50000 100000", "warning"), ("", "ok")])
def test_share_of_a_core_is_noticed(limit, status, probe_is, monkeypatch):
    monkeypatch.setattr(module, "_cgroup", {"cpu.max": limit, "memory.max": "max"}.get)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1}, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    row = row_of("cores")
    assert (row.status, row.found) == (status, f"usable: {2 if status == 'ok' else 0.5} of 2")


@pytest.mark.parametrize("free, status", [(800, "problem"), (1000, "warning"), (2000, "ok")])
def test_memory_is_counted_in_ranks(free, status, probe_is, monkeypatch):
    monkeypatch.setattr(module, "_cgroup", lambda name: "")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: Memory(free * MIB))
    assert row_of("memory").status == status


def test_memory_limit_of_a_container_counts_and_its_cache_does_not(probe_is, monkeypatch):
    limits = {"memory.max": 2000, "memory.current": 1900, "memory.stat": 850}
    texts = {name: str(size * MIB) for name, size in limits.items()} | {"cpu.max": ""}
    texts["memory.stat"] = f"anon 5\ninactive_file {texts['memory.stat']}"
    monkeypatch.setattr(module, "_cgroup", texts.get)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: Memory(9000 * MIB))
    assert row_of("memory").found.startswith("950 MiB free")
    assert row_of("memory").status == "warning"


@pytest.mark.parametrize("name", ["no such host", "198.51.100.7"])
def test_host_name_must_be_an_address_of_this_machine(name, probe_is, monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: name)
    row = row_of("host name")
    assert row.status == "warning"
    assert f"'127.0.0.1 {name}'" in row.cure
    assert "GLOO_SOCKET_IFNAME" in row.cure


def test_interfaces_without_loopback_are_a_problem(probe_is, monkeypatch):
    assert module.LOOPBACK in row_of("interfaces").found
    addresses = {name: a for name, a in psutil.net_if_addrs().items() if name != module.LOOPBACK}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: addresses)
    assert row_of("interfaces").status == "problem"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/dev/shm is a thing of Linux")
@pytest.mark.parametrize("free, status", [(64, "warning"), (65, "ok")])
def test_small_shared_memory_is_noticed(free, status, probe_is, monkeypatch):
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: Usage(0, 0, free * MIB if path == "/dev/shm" else 0))
    assert row_of("/dev/shm").status == status


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


def test_backends_are_tried_where_launch_lets_ranks_talk(probe_is, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such0")
    probe_is(
        "import json, os\n"
        "print('found', json.dumps({'threads': 2, 'gpus': 0, 'cuda': None, 'gloo': os.environ['GLOO_SOCKET_IFNAME']}))"
    )
    assert row_of("gloo").found == f"fails: {module.LOOPBACK}"


def test_real_probe_reports_a_backend_that_fails():
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "no-such0"}
    run = subprocess.run(module.PROBE, env=environment, capture_output=True, text=True, check=True, timeout=120)
    assert re.search(r'^found \{"gloo": "RuntimeError: .*no-such0', run.stdout, re.M)


def test_failing_gloo_is_a_problem(probe_is):
    probe_is("""print('found {"threads": 2, "gpus": 0, "cuda": null, "gloo": "RuntimeError: no route"}')""")
    report = doctor()
    row = row_of("gloo", report)
    assert (row.status, row.found) == ("problem", "fails: RuntimeError: no route")
    assert not report.ok


def test_crashing_nccl_does_not_hide_gloo(probe_is):
    probe_is(
        """import os; print('found {"threads": 2, "gpus": 2, "cuda": "13.0"}\\nNCCL INFO found it\\n'"""
        """'found {"gloo": ""}', flush=True); os.abort()"""
    )
    report = doctor()
    assert row_of("gloo", report).status == "ok"
    assert row_of("nccl", report).found == "fails: exit status -6"
    assert "backend='gloo'" in row_of("nccl", report).cure


def test_hung_probe_is_ended(probe_is, monkeypatch, tmp_path):
    monkeypatch.setattr(module, "PROBE_SECONDS", 2)
    probe_is(
        f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n"
        """print('found {"threads": 2, "gpus": 1, "cuda": "13.0"}\\nfound {"gloo": ""}', flush=True); time.sleep(30)"""
    )
    start = time.monotonic()
    report = doctor()
    assert time.monotonic() - start < 20
    assert row_of("nccl", report).found == "fails: no answer within 2 s"
    assert row_of("gloo", report).status == "ok"
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


def test_interrupt_ends_the_probe(probe_is, monkeypatch):
    started = []

    def interrupt():
        started.extend(psutil.Process().children())
        raise KeyboardInterrupt

    probe_is("import time; time.sleep(30)")
    monkeypatch.setattr(module, "_memory", interrupt)
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        doctor()
    assert time.monotonic() - start < 20
    assert started
    assert not any(child.is_running() for child in started)


def test_gpus_are_named(probe_is):
    probe_is("""print('found {"threads": 2, "gpus": 2, "gloo": "", "nccl": "", "names": ["H200", "T4"]}')""")
    report = doctor()
    assert row_of("GPUs", report).found == "2: H200, T4; this process has not initialised CUDA"
    assert row_of("nccl", report) == Row("nccl", "works, tried with one process")


def test_gpu_that_pytorch_can_not_use_is_noticed(probe_is, monkeypatch):
    monkeypatch.setattr(module.shutil, "which", lambda name: None)
    assert row_of("GPUs").status == "ok"
    assert row_of("nccl") == Row("nccl", "not tried: it needs a GPU per rank")
    monkeypatch.setattr(module.shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    assert row_of("GPUs").status == "warning"


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
