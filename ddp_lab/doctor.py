"""Say what this machine can do, row by row, with a cure wherever it can't: `ddp_lab.doctor()`.

In a terminal: `python -m ddp_lab.doctor`; its exit status is 1 if any row is a problem.
Only the standard library is imported on top: where a package is missing, the doctor must still be able to say so.
"""

import html
import json
import os
import re
import shutil
import site
import socket
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
LOOPBACK = "lo" if sys.platform.startswith("linux") else "lo0"  # where `launch` lets its ranks talk
MIB = 1 << 20
RANK_MIB = 450  # measured: each of four DDP ranks started by spawn held 444 MiB
PROBE = [sys.executable, "-P", __file__, "--probe"]
PROBE_SECONDS = 60  # it takes 2 to 3; the first import of PyTorch from a slow disk takes longer
STYLES = {"ok": ("✓", "success"), "warning": ("▲", "warn"), "problem": ("✗", "error")}  # symbol, JupyterLab's colour

EFFECTS = {  # names of environment variables: what they do; the first match counts
    r"CUDA_VISIBLE_DEVICES": "the GPUs that a process sees, counted from 0 again",
    r"DDP_LAB_DATA": "the folder where the lab looks for MNIST",
    r"GLOO_SOCKET_IFNAME": "the network interface that gloo takes outside launch()",
    r"GLOO_.*": "a setting of gloo",
    r"MASTER_(ADDR|PORT)": "where ranks meet outside launch(), which chooses its own place",
    r"NCCL_SOCKET_IFNAME": "the network interfaces that NCCL takes outside launch()",
    r"NCCL_DEBUG": "how much NCCL prints",
    r"NCCL_(IB|P2P|SHM)_DISABLE": "turns off one of NCCL's fast paths",
    r"(TORCH_)?NCCL_.*": "a setting of NCCL",
    r"OMP_NUM_THREADS": "CPU threads of a process, so of each rank; launch() takes 1 where it is unset",
    r"(LOCAL_)?(RANK|WORLD_SIZE)|TORCHELASTIC_.*": "set by torchrun or a scheduler for one rank",
    r"TORCH_DISTRIBUTED_DEBUG": "compares the ranks before each collective",
}
HARMS = (  # NAME=value of those that hurt on any machine, how much, and the cure
    (r"CUDA_VISIBLE_DEVICES=(-1)?", "warning", "unset it, or PyTorch sees no GPU"),
    (r"MASTER_.*", "warning", "unset it: two jobs that meet in one place disturb each other"),
    (r"NCCL_(IB|P2P|SHM)_DISABLE=(?!0$).*", "warning", "unset it, unless NCCL fails without it"),
    (r"OMP_NUM_THREADS=(?![1-9]\d*$).*", "problem", "unset it, or set it to a whole number from 1 on"),
    (
        r"(LOCAL_)?(RANK|WORLD_SIZE)=.*|TORCHELASTIC_.*",
        "warning",
        "unset it: a cell that joins a group waits for others",
    ),
    (
        r"TORCH_DISTRIBUTED_DEBUG=(?i:detail)",
        "warning",
        "unset it after debugging: steps of 3.0 ms took 8.2 ms with it",
    ),
    (r"TORCH_DISTRIBUTED_DEBUG=(?!(?i:off|info)$).*", "problem", "unset it, or set it to OFF, INFO or DETAIL"),
)


@dataclass(frozen=True, slots=True)
class Row:
    """One finding; `status` is "ok", "warning" or "problem", and the latter two come with a cure."""

    topic: str
    found: str
    status: str = "ok"
    cure: str = ""


@dataclass(frozen=True, repr=False)
class Report:
    """Every finding about this machine: a table in a notebook, text in a terminal."""

    rows: tuple[Row, ...]

    @property
    def ok(self) -> bool:
        """No row is a problem; there may be warnings."""
        return all(row.status != "problem" for row in self.rows)

    @property
    def summary(self) -> str:
        """Everything works, or the number of problems and what cures the first."""
        problems = [row for row in self.rows if row.status == "problem"]
        if problems:
            first, number = problems[0], len(problems)  # no full stop after what may be a command to copy
            return f"{number} problem{'s' * (number > 1)}; the first cure, for {first.topic}: {first.cure}"
        warnings = sum(row.status == "warning" for row in self.rows)
        return "Everything works" + (f", with {warnings} warning{'s' * (warnings > 1)}." if warnings else ".")

    def __repr__(self) -> str:
        width = 2 + max(len(row.topic) for row in self.rows)
        return "\n".join([*(_row_text(row, width) for row in self.rows), "", textwrap.fill(self.summary, 100)])

    def _repr_html_(self) -> str:
        left = 'style="text-align:left"'
        heads = "".join(f'<th scope="col" {left}>{head}</th>' for head in ("Status", "Topic", "Found", "Cure"))
        return (
            '<table style="color:var(--jp-content-font-color1, inherit)">'
            f'<caption style="text-align:left; color:inherit">{html.escape(self.summary)}</caption>'
            f"<thead><tr>{heads}</tr></thead><tbody>{''.join(map(_row_html, self.rows))}</tbody></table>"
        )


def doctor() -> Report:
    """Look at everything that distributed training needs here, in a few seconds, and change nothing.

    Backends are tried in another process: this one gets no process group, and its CUDA stays as it is.
    """
    checks = (_versions, _environment, _variables, _cores, _memory, _host_name, _interfaces, _shared_memory)
    with _start_probe() as probe:  # it imports PyTorch while the rest is looked at
        try:
            rows = [row for check in checks for row in _rows(check)]
            data = _rows(_data)
            found, complaint = _end_probe(probe)
        finally:
            probe.kill()
    return Report((*rows, *_rows(_pytorch, found, complaint), *data))  # causes first


def _rows(check: Callable[..., list[Row]], *arguments) -> list[Row]:
    """One check that breaks must not hide what the others found."""
    try:
        return check(*arguments)
    except Exception as error:
        topic, cure = check.__name__.strip("_").replace("_", " "), "cure the other rows first, then look again"
        return [Row(topic, f"could not be looked at: {type(error).__name__}: {error}", "problem", cure)]


def _row(topic: str, found: str, cure: str, warning: bool = False, problem: bool = False) -> Row:
    status = "problem" if problem else "warning" if warning else "ok"
    return Row(topic, found, status, "" if status == "ok" else cure)


def _versions() -> list[Row]:
    bad, found = [], [f"Python {sys.version.split()[0]}"]
    for package, minimum in _requirements():
        try:
            version = metadata.version(package)
        except metadata.PackageNotFoundError:
            version = "missing"  # has no numbers, so it counts as too old
        if _numbers(version) < _numbers(minimum):
            cure = _install(f"{package}>={minimum}")
            bad.append(Row(package, f"{version}; the lab needs {minimum} or later", "problem", cure))
        else:
            found.append(f"{package} {version}")
    return [Row("versions", ", ".join(found)), *bad]


def _requirements() -> list[tuple[str, str]]:
    """Return (package, minimum version) as the lab declares them, be it installed or just a checkout."""
    try:
        declared = metadata.requires("ddp-lab")
    except metadata.PackageNotFoundError:
        declared = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["dependencies"]
    matches = (re.match(r"([\w.-]+) *>= *([\d.]+)", line) for line in declared if "extra ==" not in line)
    return [match.groups() for match in matches if match]


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version.split("+")[0])[:3]]


def _install(requirement: str) -> str:
    if (Path(sys.prefix) / "conda-meta").is_dir():  # pip would put its own build of PyTorch over conda's
        return f"conda env update -f {REPOSITORY / 'environment.yml'}"
    return f"{sys.executable} -m pip install --upgrade '{requirement}'"


def _environment() -> list[Row]:
    """A notebook may run in another Python than the one that the lab was installed for."""
    here = [*site.getsitepackages(), site.getusersitepackages()]
    if any(metadata.distributions(name="ddp-lab", path=here)):
        return [Row("environment", f"the lab is installed for this Python, that of {Path(sys.prefix).name}")]
    found = f"the lab is found in {REPOSITORY} but not installed for {sys.executable}"
    cure = f"choose the kernel of the lab, or run: {sys.executable} -m pip install -e {REPOSITORY}"
    return [Row("environment", found, "warning", cure)]


def _variables() -> list[Row]:
    rows = [row for name, value in sorted(os.environ.items()) for row in _variable(name, value)]
    return rows or [Row("variables", "none is set that changes how ranks start, talk or compute")]


def _variable(name: str, value: str) -> list[Row]:
    effect = next((effect for pattern, effect in EFFECTS.items() if re.fullmatch(pattern, name)), None)
    if effect is None:
        return []
    harms = (harm for pattern, *harm in HARMS if re.fullmatch(pattern, f"{name}={value}", re.S))
    status, cure = next(harms, None) or _harm_here(name, value)
    shown = value if len(value) <= 60 else f"{value[:59]}…"
    return [Row(name, f"'{shown}': {effect}", status, cure)]


def _harm_here(name: str, value: str) -> tuple[str, str]:
    """Return the status and the cure of a value that may be right on another machine."""
    cure = "unset it, or name a network interface of this machine, as below"
    if name == "GLOO_SOCKET_IFNAME" and set(value.split(",")) - {"", *_addresses()}:
        return "problem", cure
    if name == "NCCL_SOCKET_IFNAME" and not value.startswith("^"):  # after ^ those to leave out, else prefixes
        wanted = tuple(value.removeprefix("=").split(","))
        return ("ok", "") if any(known.startswith(wanted) for known in _addresses()) else ("warning", cure)
    if name == "OMP_NUM_THREADS" and 2 * int(value) > max(2, _usable_cores()):
        return "warning", "unset it, or set it to 1: two ranks want more threads than there are cores"
    return "ok", ""


def _cores() -> list[Row]:
    usable = _usable_cores()
    found, cure = f"usable: {usable:.3g} of {os.cpu_count()}", "use 2 or more; with less it works, but ranks take turns"
    return [_row("cores", found, cure, warning=usable < 2)]


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
    if limit.isdigit():
        cache = re.search(r"^inactive_file (\d+)", _cgroup("memory.stat"), re.M)
        free = min(free, int(limit) - int(_cgroup("memory.current")) + int(cache[1] if cache else 0))
    free = max(0, free // MIB)
    found = f"{free:,} MiB free; a rank takes about {RANK_MIB} MiB"
    cure = "close other programs, or shut down the kernels of other notebooks"
    return [_row("memory", found, cure, warning=free < 4 * RANK_MIB, problem=free < 2 * RANK_MIB)]


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
    return [_row("interfaces", found, cure, problem=not loopback)]


def _addresses() -> dict[str, list[str]]:
    """Return the IP addresses of each network interface that has one."""
    import psutil  # may be missing, see the top of this file

    families = (socket.AF_INET, socket.AF_INET6)
    found = {}
    for name, entries in psutil.net_if_addrs().items():
        if addresses := [entry.address for entry in entries if entry.family in families]:
            found[name] = addresses
    return found


def _shared_memory() -> list[Row]:
    if not sys.platform.startswith("linux"):
        return []
    free = shutil.disk_usage("/dev/shm").free // MIB
    found = f"{free:,} MiB free; the workers of a DataLoader pass batches through it"
    cure = "enlarge it (docker run --shm-size=1g), or use num_workers=0"
    return [_row("/dev/shm", found, cure, warning=free <= 64)]  # 64 MiB is all that Docker gives


def _data() -> list[Row]:
    from ddp_lab import data  # imports PyTorch, see the top of this file

    try:
        folder = data.data_folder()
    except FileNotFoundError as error:
        return [_refused("data", error)]
    free = shutil.disk_usage(folder).free // MIB
    cure = f"free some on the disk of {folder}: checkpoints and full MNIST take up to 200 MiB"
    rows = [_row("disk", f"{free:,} MiB free at the data folder", cure, warning=free < 200)]
    for topic, root in (("sample", data.prepare_data()), ("full MNIST", folder)):
        try:
            data.check_files(root)
            rows.append(Row(topic, "its files are valid"))
        except (FileNotFoundError, ValueError) as error:
            absent = Row(topic, "absent, and not needed; ddp_lab.prepare_data(full=True) brings it")
            rows.append(_refused(topic, error) if topic == "sample" or (root / "MNIST").is_dir() else absent)
    return rows


def _refused(topic: str, error: Exception) -> Row:
    """The lab's errors are one sentence: what is wrong, a colon, and the cure."""
    found, _, cure = str(error).rpartition(": ")
    return Row(topic, found, "problem", cure)


def _start_probe() -> subprocess.Popen:
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": LOOPBACK, "NCCL_SOCKET_IFNAME": LOOPBACK}
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
    lines = (line.removeprefix("found ") for line in output.split("\n") if line.startswith("found "))
    return {name: value for line in lines for name, value in json.loads(line).items()}, complaint


def _probe() -> None:
    """In a process of its own: print each finding as soon as it is there, as the next may hang or crash."""
    import torch
    import torch.distributed as dist

    def say(**found):
        print("found", json.dumps(found), flush=True)  # marked, as NCCL prints too

    gpus = torch.cuda.device_count()
    say(threads=torch.get_num_threads(), gpus=gpus, cuda=torch.version.cuda)
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


def _pytorch(found: dict, complaint: str) -> list[Row]:
    """Turn what the probe found into rows; `complaint` is why it found no more."""
    reinstall = f"cure the other rows first; if this one stays, run: {_install('torch')}"
    if "threads" not in found:
        return [Row("PyTorch", f"does not start: {complaint}", "problem", reinstall)]
    per_rank = os.environ.get("OMP_NUM_THREADS", "1")
    threads = f"{per_rank} for a rank of launch(), {found['threads']} for a process started otherwise"
    rows = [Row("threads", threads), _gpus(found)]
    gloo_instead = "use backend='gloo', and find the reason with NCCL_DEBUG=INFO"
    for backend, cure in (("gloo", reinstall), ("nccl", gloo_instead)):
        if backend == "nccl" and not found["gpus"]:
            rows.append(Row(backend, "not tried: it needs a GPU per rank"))
        elif error := found.get(backend, complaint):
            rows.append(Row(backend, f"fails: {error}", "problem", cure))
        else:
            rows.append(Row(backend, "works, tried with one process"))
    return rows


def _gpus(found: dict) -> Row:
    torch = sys.modules.get("torch")
    if found["gpus"]:
        used = "has" if torch and torch.cuda.is_initialized() else "has not"
        return Row(
            "GPUs", f"{found['gpus']}: {', '.join(found.get('names', []))}; this process {used} initialised CUDA"
        )
    driver = bool(shutil.which("nvidia-smi"))
    text = "none that PyTorch can use, but an NVIDIA driver" if driver else "none, so ranks use the CPU"
    cure = f"install a PyTorch for the CUDA that nvidia-smi prints; this one was built for {found['cuda'] or 'none'}"
    return _row("GPUs", text, cure, warning=driver)


def _row_text(row: Row, width: int) -> str:
    margin = 9 + width
    texts = [row.found, f"cure: {row.cure}"] if row.cure else [row.found]
    lines = [line for text in texts for line in textwrap.wrap(text, 100 - margin, break_on_hyphens=False)]
    return f"{row.status:9}{row.topic:{width}}" + f"\n{'':{margin}}".join(lines)


def _row_html(row: Row) -> str:
    symbol, colour = STYLES[row.status]
    topic, found, cure = (html.escape(text) for text in (row.topic, row.found, row.cure))
    left = 'style="text-align:left"'
    mark = f'<span aria-hidden="true" style="color:var(--jp-{colour}-color1, inherit)">{symbol}</span>'
    status = f'<td style="text-align:left; white-space:nowrap">{mark} {row.status}</td>'
    return f'<tr>{status}<th scope="row" {left}>{topic}</th><td {left}>{found}</td><td {left}>{cure}</td></tr>'


if __name__ == "__main__":
    if sys.argv[1:] == ["--probe"]:
        sys.exit(_probe())
    sys.stdout.reconfigure(errors="replace")  # not every pipe can carry every character of an error message
    report = doctor()
    print(report)
    sys.exit(0 if report.ok else 1)
