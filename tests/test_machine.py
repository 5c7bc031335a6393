"""Each check finds its fault with a cure, and the process that tries the backends may fail, crash or hang."""

import os
import re
import socket
import subprocess
import sys
import time
from collections import namedtuple

import psutil
import pytest

from ddp_lab import machine
from ddp_lab.machine import Row

Usage = namedtuple("Usage", "total used free")
Memory = namedtuple("Memory", "available")
MIB = 1 << 20
WITHOUT_GPU = """print('found {"threads": 2, "gpus": 0, "cuda": "13.0", "gloo": "", "names": []}')"""


pytestmark = pytest.mark.usefixtures("plain_environment")


@pytest.fixture
def probed(monkeypatch):
    """Return the rows made of what a quick program says in place of the one that tries the backends."""

    def rows(code: str) -> list[Row]:
        monkeypatch.setattr(machine, "PROBE", [sys.executable, "-I", "-S", "-c", code])
        with machine.start_probe() as probe:
            return machine.pytorch(probe)

    return rows


def row_of(topic: str, rows: list[Row]) -> Row:
    [row] = [row for row in rows if row.topic == topic]
    assert bool(row.cure) == (row.status != "ok")
    return row


def test_conda_is_not_told_to_use_pip(tmp_path, monkeypatch):
    (tmp_path / "conda-meta").mkdir()
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert machine.install("torch>=2.9").startswith("conda env update -f ")


@pytest.mark.parametrize(
    "name, value, status",
    [
        ("CUDA_VISIBLE_DEVICES", "", "warning"),
        ("CUDA_VISIBLE_DEVICES", "-1", "warning"),
        ("CUDA_VISIBLE_DEVICES", "1,0", "ok"),
        ("DDP_LAB_DATA", str(machine.REPOSITORY / "data"), "ok"),
        ("GLOO_SOCKET_IFNAME", "no-such0", "problem"),
        ("GLOO_SOCKET_IFNAME", f"{machine.LOOPBACK},no-such0", "problem"),
        ("GLOO_SOCKET_IFNAME", machine.LOOPBACK, "ok"),
        ("MASTER_ADDR", "10.0.0.1", "warning"),
        ("MASTER_PORT", "29500", "warning"),
        ("NCCL_DEBUG", "INFO", "ok"),
        ("NCCL_P2P_DISABLE", "1", "warning"),
        ("NCCL_P2P_DISABLE", "0", "ok"),
        ("NCCL_SOCKET_IFNAME", "no-such", "warning"),
        ("NCCL_SOCKET_IFNAME", "=" + machine.LOOPBACK, "ok"),
        ("NCCL_SOCKET_IFNAME", "^no-such", "ok"),
        ("OMP_NUM_THREADS", "1", "ok"),
        ("OMP_NUM_THREADS", "100000", "warning"),
        ("OMP_NUM_THREADS", "1,8", "ok"),
        ("OMP_NUM_THREADS", "0", "warning"),
        ("OMP_NUM_THREADS", "many", "warning"),
        ("RANK", "0", "warning"),
        ("LOCAL_WORLD_SIZE", "2", "warning"),
        ("TORCHELASTIC_RUN_ID", "none", "warning"),
        ("TORCH_DISTRIBUTED_DEBUG", "DETAIL", "warning"),
        ("TORCH_DISTRIBUTED_DEBUG", "info", "ok"),
        ("TORCH_DISTRIBUTED_DEBUG", "yes", "problem"),
        ("TORCH_NCCL_BLOCKING_WAIT", "1", "ok"),
    ],
)
def test_variable_is_shown_with_what_it_does(name, value, status, monkeypatch):
    assert row_of("variables", machine._variables()).status == "ok"
    monkeypatch.setenv(name, value)
    row = row_of(name, machine._variables())
    assert row.status == status
    assert row.found.startswith(f"'{value[:40]}")
    assert len(row.found.split("': ")[1]) > 10


@pytest.mark.parametrize("cores, status", [(4, "ok"), (3, "warning")])
def test_first_of_several_numbers_of_threads_counts(cores, status, probed, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2,1")
    monkeypatch.setattr(machine, "_usable_cores", lambda: cores)
    assert row_of("OMP_NUM_THREADS", machine._variables()).status == status
    assert row_of("threads", probed(WITHOUT_GPU)).found.startswith("2 for a rank of launch(), 2 for a process")


@pytest.mark.parametrize("value", ["0", "", "many", "-2", "2x,1", ",2"])
def test_invalid_number_of_threads_is_one_thread(value, probed, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    row = row_of("OMP_NUM_THREADS", machine._variables())
    assert (row.status, row.cure) == ("warning", "unset it, or set it to 1 or more: launch() uses 1 thread")
    assert row_of("threads", probed(WITHOUT_GPU)).found.startswith("1 for a rank")


def test_pytorch_refuses_the_debug_level_that_is_called_a_problem():
    code = "import torch.distributed"
    run = subprocess.run([sys.executable, "-c", code], env=os.environ | {"TORCH_DISTRIBUTED_DEBUG": "yes"})
    assert run.returncode != 0


@pytest.mark.parametrize("limit, status", [("max 100000", "ok"), ("50000 100000", "warning"), ("", "ok")])
def test_share_of_a_core_is_noticed(limit, status, monkeypatch):
    monkeypatch.setattr(machine, "_cgroup", {"cpu.max": limit, "memory.max": "max"}.get)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1}, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    row = row_of("cores", machine._cores())
    assert (row.status, row.found) == (status, f"usable: {2 if status == 'ok' else 0.5} of 2")


@pytest.mark.parametrize("free, status", [(800, "problem"), (1000, "warning"), (2000, "ok")])
def test_memory_is_counted_in_ranks(free, status, monkeypatch):
    monkeypatch.setattr(machine, "_cgroup", lambda name: "")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: Memory(free * MIB))
    assert row_of("memory", machine._memory()).status == status


def test_memory_limit_of_a_container_counts_and_its_cache_does_not(monkeypatch):
    limits = {"memory.max": 2000, "memory.current": 1900, "memory.stat": 850}
    texts = {name: str(size * MIB) for name, size in limits.items()} | {"cpu.max": ""}
    texts["memory.stat"] = f"anon 5\ninactive_file {texts['memory.stat']}"
    monkeypatch.setattr(machine, "_cgroup", texts.get)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: Memory(9000 * MIB))
    assert row_of("memory", machine._memory()).found.startswith("950 MiB free")
    assert row_of("memory", machine._memory()).status == "warning"


@pytest.mark.parametrize("name", ["no such host", "198.51.100.7"])
def test_host_name_must_be_an_address_of_this_machine(name, monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: name)
    row = row_of("host name", machine._host_name())
    assert row.status == "warning"
    assert f"'127.0.0.1 {name}'" in row.cure
    assert "GLOO_SOCKET_IFNAME" in row.cure


def test_interfaces_without_loopback_are_a_problem(monkeypatch):
    assert machine.LOOPBACK in row_of("interfaces", machine._interfaces()).found
    addresses = {name: a for name, a in psutil.net_if_addrs().items() if name != machine.LOOPBACK}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: addresses)
    assert row_of("interfaces", machine._interfaces()).status == "problem"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/dev/shm is a thing of Linux")
@pytest.mark.parametrize("free, status", [(64, "warning"), (65, "ok")])
def test_small_shared_memory_is_noticed(free, status, monkeypatch):
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: Usage(0, 0, free * MIB if path == "/dev/shm" else 0))
    assert row_of("/dev/shm", machine._shared_memory()).status == status


def test_backends_are_tried_where_launch_lets_ranks_talk(probed, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such0")
    rows = probed(
        "import json, os\n"
        "print('found', json.dumps({'threads': 2, 'gpus': 0, 'cuda': None, 'gloo': os.environ['GLOO_SOCKET_IFNAME']}))"
    )
    assert row_of("gloo", rows).found == f"fails: {machine.LOOPBACK}"


def test_real_probe_reports_a_backend_that_fails():
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "no-such0"}
    run = subprocess.run(machine.PROBE, env=environment, capture_output=True, text=True, check=True, timeout=120)
    assert re.search(r'^found \{"gloo": "RuntimeError: .*no-such0', run.stdout, re.M)


def test_crashing_nccl_does_not_hide_gloo(probed):
    rows = probed(
        """import os; print('found {"threads": 2, "gpus": 2, "cuda": "13.0"}\\nNCCL INFO found it\\n'"""
        """'found {"gloo": ""}', flush=True); os.abort()"""
    )
    assert row_of("gloo", rows).status == "ok"
    assert row_of("nccl", rows).found == "fails: exit status -6"
    assert "backend='gloo'" in row_of("nccl", rows).cure


def test_hung_probe_is_ended(probed, monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "PROBE_SECONDS", 2)
    start = time.monotonic()
    rows = probed(
        f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n"
        """print('found {"threads": 2, "gpus": 1, "cuda": "13.0"}\\nfound {"gloo": ""}', flush=True); time.sleep(30)"""
    )
    assert time.monotonic() - start < 20
    assert row_of("nccl", rows).found == "fails: no answer within 2 s"
    assert row_of("gloo", rows).status == "ok"
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


def test_gpus_are_named(probed):
    rows = probed("""print('found {"threads": 2, "gpus": 2, "gloo": "", "nccl": "", "names": ["H200", "T4"]}')""")
    assert row_of("GPUs", rows).found == "2: H200, T4; this process has not initialised CUDA"
    assert row_of("nccl", rows) == Row("nccl", "works, tried with one process")


def test_gpu_that_pytorch_can_not_use_is_noticed(probed, monkeypatch):
    monkeypatch.setattr(machine.shutil, "which", lambda name: None)
    rows = probed(WITHOUT_GPU)
    assert row_of("GPUs", rows).status == "ok"
    assert row_of("nccl", rows) == Row("nccl", "not tried: it needs a GPU per rank")
    monkeypatch.setattr(machine.shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    assert row_of("GPUs", probed(WITHOUT_GPU)).status == "warning"
