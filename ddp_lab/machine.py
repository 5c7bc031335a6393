"""What the doctor looks at: a function for each check, and a process of its own that tries the backends.

Only the standard library is imported on top: where a package is missing, the doctor must still be able to say so.
"""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
LOOPBACK = "lo" if sys.platform.startswith("linux") else "lo0"  # where `launch` lets its ranks talk
MIB = 1 << 20
RANK_MIB = 450  # measured: each of four DDP ranks started by spawn held 444 MiB
PROBE = [sys.executable, "-P", __file__, "--probe"]  # no -m: the lab may not be installed
PROBE_SECONDS = 60  # it takes 2 to 3; the first import of PyTorch from a slow disk takes longer

VARIABLES = {  # names of environment variables: what they do; the first match counts
    r"CUDA_VISIBLE_DEVICES": "the GPUs that a process sees, counted from 0 again",
    r"DDP_LAB_DATA": "the folder where the lab looks for MNIST",
    r"GLOO_SOCKET_IFNAME": "the network interface that gloo takes outside launch()",
    r"GLOO_.*": "a setting of gloo",
    r"MASTER_(ADDR|PORT)": "where ranks meet outside launch(), which chooses its own place",
    r"NCCL_SOCKET_IFNAME": "the network interfaces that NCCL takes outside launch()",
    r"NCCL_DEBUG": "how much NCCL prints",
    r"NCCL_(IB|P2P|SHM)_DISABLE": "turns off one of NCCL's fast paths",
    r"(TORCH_)?NCCL_.*": "a setting of NCCL",
    r"OMP_NUM_THREADS": "CPU threads of a process, so of each rank; launch() takes 1 where it is unset or invalid",
    r"(LOCAL_)?(RANK|WORLD_SIZE)|TORCHELASTIC_.*": "set by torchrun or a scheduler for one rank",
    r"TORCH_DISTRIBUTED_DEBUG": "compares the ranks before each collective",
}
HARMS = {  # NAME=value of those that hurt on any machine: how much, and the cure
    r"CUDA_VISIBLE_DEVICES=(-1)?": ("warning", "unset it, or PyTorch sees no GPU"),
    r"MASTER_.*": ("warning", "unset it: two jobs that meet in one place disturb each other"),
    r"NCCL_(IB|P2P|SHM)_DISABLE=(?!0$).*": ("warning", "unset it, unless NCCL fails without it"),
    r"OMP_NUM_THREADS=(?!0*[1-9]\d*(,|$)).*": ("warning", "unset it, or set it to 1 or more: launch() uses 1 thread"),
    r"((LOCAL_)?(RANK|WORLD_SIZE)|TORCHELASTIC).*": ("warning", "unset it: a cell that joins a group waits for others"),
    r"TORCH_DISTRIBUTED_DEBUG=(?i:detail)": ("warning", "unset it after debugging: steps of 3.0 ms took 8.2 ms"),
    r"TORCH_DISTRIBUTED_DEBUG=(?!(?i:off|info)$).*": ("problem", "unset it, or set it to OFF, INFO or DETAIL"),
}


@dataclass(frozen=True, slots=True)
class Row:
    """One finding; `status` is "ok", "warning" or "problem", and the latter two come with a cure."""

    topic: str
    found: str
    status: str = "ok"
    cure: str = ""

    @classmethod
    def judged(cls, topic: str, found: str, cure: str, warning: bool = False, problem: bool = False) -> "Row":
        """Return a finding whose status depends; the cure is shown unless the row is ok."""
        status = "problem" if problem else "warning" if warning else "ok"
        return cls(topic, found, status, "" if status == "ok" else cure)


def install(requirement: str) -> str:
    """Return the command that installs a package here."""
    if (Path(sys.prefix) / "conda-meta").is_dir():  # pip would put its own build of PyTorch over conda's
        return f"conda env update -f {REPOSITORY / 'environment.yml'}"
    return f"{sys.executable} -m pip install --upgrade '{requirement}'"


def _variables() -> list[Row]:
    rows = []
    for name, value in sorted(os.environ.items()):
        if effect := next((VARIABLES[known] for known in VARIABLES if re.fullmatch(known, name)), None):
            harms = (HARMS[known] for known in HARMS if re.fullmatch(known, f"{name}={value}", re.S))
            shown = value if len(value) <= 60 else f"{value[:59]}…"
            rows.append(Row(name, f"'{shown}': {effect}", *(next(harms, None) or _harm_here(name, value))))
    return rows or [Row("variables", "none is set that changes how ranks start, talk or compute")]


def _harm_here(name: str, value: str) -> tuple[str, str]:
    """Return the status and the cure of a value that may be right on another machine."""
    cure = "unset it, or name a network interface of this machine, as below"
    if name == "GLOO_SOCKET_IFNAME" and set(value.split(",")) - {"", *_addresses()}:
        return "problem", cure
    if name == "NCCL_SOCKET_IFNAME" and not value.startswith("^"):  # after ^ those to leave out, else prefixes
        wanted = tuple(value.removeprefix("=").split(","))
        return ("ok", "") if any(known.startswith(wanted) for known in _addresses()) else ("warning", cure)
    if name == "OMP_NUM_THREADS" and 2 * _rank_threads() > max(2, _usable_cores()):
        return "warning", "unset it, or set it to 1: two ranks want more threads than there are cores"
    return "ok", ""


def _rank_threads() -> int:
    """Return the threads that a rank of `launch` takes, by the rule of worker.py."""
    first = os.environ.get("OMP_NUM_THREADS", "1").split(",")[0]
    return max(1, int(first)) if first.isdecimal() else 1


def _start_method() -> list[Row]:
    """A forked copy of this process would inherit its CUDA and its threads' locks, and fail or hang."""
    fast = getattr(sys.modules.get("ddp_lab.processes"), "_preloaded", False)
    way = "forkserver, from a process that has imported PyTorch" if fast else "spawn: each rank is a new Python"
    return [Row("start method", f"{way}; launch() never forks this process")]


def _cores() -> list[Row]:
    usable = _usable_cores()
    found, cure = f"usable: {usable:.3g} of {os.cpu_count()}", "use 2 or more; with less it works, but ranks take turns"
    return [Row.judged("cores", found, cure, warning=usable < 2)]


def _usable_cores() -> float:
    """A container may be limited to some cores, to a share of their time, or both."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    quota, period = (_cgroup("cpu.max") or "max 1").split()
    return cores if quota == "max" else min(cores, int(quota) / int(period))


def _cgroup(name: str) -> str:
    """Return one of the container's limits, or "" where there is none."""
    try:
        return Path("/sys/fs/cgroup", name).read_text().strip()
    except OSError:
        return ""


def _memory() -> list[Row]:
    import psutil  # may be missing, see the top of this file

    free, limit = psutil.virtual_memory().available, _cgroup("memory.max")
    if limit.isdecimal():
        cache = re.search(r"^inactive_file (\d+)", _cgroup("memory.stat"), re.M)
        free = min(free, int(limit) - int(_cgroup("memory.current")) + int(cache[1] if cache else 0))
    free = max(0, free // MIB)
    found = f"{free:,} MiB free; a rank takes about {RANK_MIB} MiB"
    cure = "close other programs, or shut down the kernels of other notebooks"
    return [Row.judged("memory", found, cure, warning=free < 4 * RANK_MIB, problem=free < 2 * RANK_MIB)]


def _host_name() -> list[Row]:
    """Outside `launch` gloo binds the host's name; where it can't, loopback, which no other machine reaches."""
    name = socket.gethostname()
    try:
        with socket.socket() as unused:  # bound, but it never listens
            unused.bind((name, 0))
            return [Row("host name", f"{name} is {unused.getsockname()[0]}")]
    except OSError as error:
        cure = f"add the line '127.0.0.1 {name}' to /etc/hosts, or set GLOO_SOCKET_IFNAME to an interface"
        return [Row("host name", f"{name} is no address of this machine ({error})", "warning", cure)]


def _interfaces() -> list[Row]:
    addresses = _addresses()
    loopback = any(address.startswith("127.") for found in addresses.values() for address in found)
    found = ", ".join(addresses) if loopback else f"{', '.join(addresses) or 'none'}, but no loopback"
    cure = f"bring up the loopback interface, where ranks meet: sudo ip link set {LOOPBACK} up"
    return [Row.judged("interfaces", found, cure, problem=not loopback)]


def _addresses() -> dict[str, list[str]]:
    """Return the IP addresses of each network interface that has one."""
    import psutil  # may be missing, see the top of this file

    ip = (socket.AF_INET, socket.AF_INET6)
    all_of = {name: [e.address for e in entries if e.family in ip] for name, entries in psutil.net_if_addrs().items()}
    return {name: addresses for name, addresses in all_of.items() if addresses}


def _shared_memory() -> list[Row]:
    if not sys.platform.startswith("linux"):
        return []
    free = shutil.disk_usage("/dev/shm").free // MIB
    found = f"{free:,} MiB free; the workers of a DataLoader pass batches through it"
    cure = "enlarge it (docker run --shm-size=1g), or use num_workers=0"
    return [Row.judged("/dev/shm", found, cure, warning=free <= 64)]  # 64 MiB is all that Docker gives


def start_probe() -> subprocess.Popen:
    """Let a process of its own try the backends, where `launch` lets its ranks talk; `pytorch` reads what it found."""
    environment = os.environ | {"GLOO_SOCKET_IFNAME": LOOPBACK, "NCCL_SOCKET_IFNAME": LOOPBACK}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(PROBE, env=environment, text=True, errors="replace", **pipes)


def _end_probe(probe: subprocess.Popen) -> tuple[dict, str]:
    """Return what `_probe` said, and why it said no more; a probe that hangs is ended."""
    try:
        output, errors = probe.communicate(timeout=PROBE_SECONDS)
        complaint = (errors.strip() or f"exit status {probe.returncode}").split("\n")[-1] if probe.returncode else ""
    except subprocess.TimeoutExpired:
        probe.kill()
        output, complaint = probe.communicate()[0], f"no answer within {PROBE_SECONDS} s"
    lines = re.findall("^found (.*)", output, re.M)
    return {name: value for line in lines for name, value in json.loads(line).items()}, complaint


def _probe() -> None:
    """In a process of its own: print each finding as soon as it is there, as the next may hang or crash."""
    import torch
    import torch.distributed as dist

    def say(**found):
        print("found", json.dumps(found), flush=True)  # marked, as NCCL prints too

    gpus = torch.cuda.device_count()
    say(threads=torch.get_num_threads(), gpus=gpus, cuda=torch.version.cuda, openmp=_openmp_runtimes())
    for backend, device in (("gloo", "cpu"), ("nccl", "cuda"))[: 2 if gpus else 1]:
        try:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # takes no port
            one = torch.ones(1, device=device)
            dist.all_reduce(one)
            say(**{backend: "" if one.item() == 1 else f"the sum of 1 over one rank is {one.item()}"})
        except Exception as error:
            say(**{backend: " ".join(f"{type(error).__name__}: {error}".split())})
        if dist.is_initialized():
            dist.destroy_process_group()
    say(names=[torch.cuda.get_device_name(index) for index in range(gpus)])


def _openmp_runtimes() -> list[str]:
    """Return the files of the OpenMP runtimes that this process has loaded; [] where the system does not tell."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    paths = {line.split(maxsplit=5)[-1] for line in lines}
    return sorted(path for path in paths if re.match(r"lib(gomp|iomp|omp)\d*\b", Path(path).name))


def pytorch(probe: subprocess.Popen) -> list[Row]:
    """Turn what the probe found into rows: threads, OpenMP, GPUs and backends."""
    found, complaint = _end_probe(probe)
    reinstall = f"cure the other rows first; if this one stays, run: {install('torch')}"
    if "threads" not in found:
        return [Row("PyTorch", f"does not start: {complaint}", "problem", reinstall)]
    threads = f"{_rank_threads()} for a rank of launch(), {found['threads']} for a process started otherwise"
    rows = [Row("threads", threads), *_openmp(found.get("openmp")), _gpus(found)]
    gloo_instead = "use backend='gloo', and find the reason with NCCL_DEBUG=INFO"
    for backend, cure in (("gloo", reinstall), ("nccl", gloo_instead)):
        if backend == "nccl" and not found["gpus"]:
            rows.append(Row(backend, "not tried: it needs a GPU per rank"))
        else:
            error = found.get(backend, complaint)
            text = f"fails: {error}" if error else "works, tried with one process"
            rows.append(Row.judged(backend, text, cure, problem=bool(error)))
    return rows


def _openmp(runtimes: list[str] | None) -> list[Row]:
    """Two OpenMP runtimes in one process may crash it or slow it down; they come from packages of mixed sources."""
    if not runtimes:
        return []
    cure = "make a new environment, with all packages from pip or all from conda, never some from each"
    names = ", ".join(runtimes if len(runtimes) > 1 else [Path(runtimes[0]).name])
    return [Row.judged("OpenMP", f"PyTorch loads {names}", cure, warning=len(runtimes) > 1)]


def _gpus(found: dict) -> Row:
    if found["gpus"]:
        torch = sys.modules.get("torch")
        used = "has" if torch and torch.cuda.is_initialized() else "has not"
        names = ", ".join(found.get("names", []))
        return Row("GPUs", f"{found['gpus']}: {names}; this process {used} initialised CUDA")
    driver = bool(shutil.which("nvidia-smi"))
    text = "none that PyTorch can use, but an NVIDIA driver" if driver else "none, so ranks use the CPU"
    cure = f"install a PyTorch for the CUDA that nvidia-smi prints; this one was built for {found['cuda'] or 'none'}"
    return Row.judged("GPUs", text, cure, warning=driver)


CHECKS = (_variables, _start_method, _cores, _memory, _host_name, _interfaces, _shared_memory)

if __name__ == "__main__" and sys.argv[1:] == ["--probe"]:
    _probe()
