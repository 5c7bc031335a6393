"""Shared by the tests: launches that show nothing and start fast, and a look at what they leave behind."""

import contextlib
import multiprocessing.util
import os
import re
import signal
import tempfile
import time
from pathlib import Path

import psutil
import pytest

import ddp_lab
from ddp_lab import machine

# A shell that starts the tests in the background lets them ignore it, and no test could press Stop.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def temporary_folder():
    """A folder for the temporary files of all tests; in the end none is the lab's, although kernels were killed."""
    multiprocessing.util.get_temp_dir()  # this process's own: Python removes it a little later
    the_labs = ("ddp_lab-", "pymp-", "pytorch-errorfile-")
    with (
        tempfile.TemporaryDirectory(prefix="tests-", ignore_cleanup_errors=True) as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", folder)
        yield
        patience = time.monotonic() + 10  # what was just ended may still be tidying
        while left := [name for name in os.listdir(folder) if name.startswith(the_labs)]:
            assert time.monotonic() < patience, left
            time.sleep(0.1)


@pytest.fixture(scope="session")
def fast():
    """Start ranks from the preloaded server, which tests of other things than starting want."""
    ddp_lab.fast_start()


@pytest.fixture
def nothing_left():
    """Fail when a test leaves a process, a listening socket, a pipe or a temporary file behind."""
    me = psutil.Process()
    ddp_lab.launch(return_rank, world_size=1, on_event=None)  # what Python starts once and keeps, it starts here
    before = [descendants(me), listening(me), pipes(), error_files()]
    yield
    assert descendants(me) == before[0]
    assert listening(me) == before[1]
    assert pipes() <= before[2]
    assert error_files() <= before[3]


@pytest.fixture
def plain_environment(monkeypatch):
    """Unset the variables that the doctor judges."""
    for name in list(os.environ):
        if any(re.fullmatch(pattern, name) for pattern in machine.VARIABLES):
            monkeypatch.delenv(name)


def return_rank(rank, world_size):
    return rank


def descendants(process: psutil.Process) -> set[int]:
    return {child.pid for child in process.children(recursive=True)}


def listening(process: psutil.Process) -> set:
    return {c.laddr for c in process.net_connections(kind="inet") if c.status == psutil.CONN_LISTEN}


def pipes() -> set[str]:
    """The pipes and sockets that this process holds open, where the system has a list of them."""
    links = Path("/proc/self/fd")
    targets = [os.readlink(link) for link in links.iterdir() if link.is_symlink()] if links.exists() else []
    return {target for target in targets if target.startswith(("pipe:", "socket:"))}


def error_files() -> set[Path]:
    """The files in which torch's own launcher leaves tracebacks."""
    return set(Path(tempfile.gettempdir()).glob("pytorch-errorfile-*"))


def pids_gone(pids, seconds=3):
    """Whether all processes end in time; one that only waits for its parent to take note has ended."""
    deadline = time.monotonic() + seconds
    while any(map(runs, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(runs, pids))


def runs(pid: int) -> bool:
    """Whether a process still runs; one that only waits for its parent to take note has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False
