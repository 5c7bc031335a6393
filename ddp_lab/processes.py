"""Start, hear and end the processes of the ranks, from the notebook's side.

Nothing here knows what a verdict is: it starts processes, takes in what they send, and guarantees that none is left.
"""

import contextlib
import math
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import multiprocessing.util
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
import time
import types
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist
import torch.multiprocessing as mp

from ddp_lab import calls, leftovers, transport, worker
from ddp_lab.events import Event
from ddp_lab.tracing import KEPT, SLOT_BYTES, SLOTS, Collective, left, without_warnings

LOOPBACK = "lo" if sys.platform.startswith("linux") else "lo0"
KEPT_OUTPUT_BYTES = 1 << 18  # of what a rank prints first, and as much of what it prints last
TERM_SECONDS = 1.0
ONE_STOP_SECONDS = 5.0  # longer than it takes to end a run

_preloaded = False
_starting = threading.Lock()


def fast_start() -> None:
    """Start later launches from a server that has imported PyTorch already: 20 to 60 times sooner.

    Still a fresh process per rank and per run. The server is forked from a process that never ran a kernel's code, so
    the hangs of forking a notebook can't happen. It imports in the background; the first launch waits for it.
    Source: https://docs.python.org/3/library/multiprocessing.html#contexts-and-start-methods
    """
    global _preloaded
    if not _preloaded:
        # Never the learner's modules or the lab's other ones: the server would keep serving yesterday's code.
        torchs = ["torch", "torch.distributed", "torch.multiprocessing", "torch._dynamo"]
        multiprocessing.set_forkserver_preload(["ddp_lab.leftovers", *torchs])
        environment = {
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            leftovers.FOLDER: multiprocessing.util.get_temp_dir(),  # where its socket will be
        }
        with _starting, _clean_start(environment), _blocked(signal.SIGTERM):  # until `leftovers` is imported
            multiprocessing.forkserver.ensure_running()
        _preloaded = True


class Rank:
    """One started process, and everything that it has sent so far."""

    def __init__(self, number: int):
        self.number = number
        self.result: bytes | None = None
        self.error: dict[str, Any] | None = None
        self.thread_error: dict[str, Any] | None = None  # the first
        self.where: list[tuple[str, int, str, str]] | None = None
        self.ended: float | None = None  # when it sent its last word, or was seen dead
        self.stopped = False  # the lab ended it
        self.gone = False  # ended, and nothing of it is left to read
        self.exit_code: int | None = None
        self.inbox: list[Event] = []
        self.calls: dict[int, Collective] = {}  # by number, the latest of them
        self.head, self.tail = bytearray(), bytearray()
        self.dropped_bytes = 0
        self.connection, theirs = multiprocessing.Pipe()
        self.output, their_output = multiprocessing.Pipe(duplex=False)
        start = mp.start_processes if _preloaded else mp.spawn
        method = {"start_method": "forkserver"} if _preloaded else {}
        # One call per rank, so that each gets a pipe of its own.
        self.memory = multiprocessing.RawArray("c", SLOTS * SLOT_BYTES)
        arguments = (number, theirs, their_output, self.memory)
        self.process = start(worker.main, arguments, nprocs=1, join=False, **method).processes[0]
        theirs.close()
        their_output.close()
        os.set_blocking(self.output.fileno(), False)

    @property
    def done(self) -> bool:
        return self.result is not None

    @property
    def alive(self) -> bool:
        return not self.gone and not multiprocessing.connection.wait([self.process.sentinel], timeout=0)

    @property
    def failed(self) -> bool:
        return not self.done and self.ended is not None

    def receive(self) -> None:
        """Take one message in."""
        try:
            tag, payload = pickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError, pickle.UnpicklingError):
            self.connection.close()
            return
        if tag == "events":
            self.inbox += [Event(self.number, *parts) for parts in payload]
        elif tag == "calls":
            self._keep(payload)
        elif tag == "thread":
            self.thread_error = self.thread_error or payload
        elif tag == "where":
            self.where = payload
        elif tag == "done":
            self.ended, self.result = payload
            self.inbox.append(Event(self.number, self.ended, "done"))
        else:
            self.ended, self.error = payload
            said = {"type": self.error["type"], "message": self.error["message"]}
            self.inbox.append(Event(self.number, self.ended, "error", said))

    def _keep(self, calls: list[tuple]) -> None:
        for parts in calls:
            call = Collective(*parts)
            self.calls[call.number] = call
        for number in sorted(self.calls)[:-KEPT]:
            del self.calls[number]

    def take(self) -> list[Event]:
        """Hand over the events that came since the last call."""
        taken, self.inbox = self.inbox, []
        return taken

    def read_output(self) -> None:
        """Take in what was printed; of very much output keep the beginning and the end."""
        try:
            chunk = os.read(self.output.fileno(), 1 << 16)
        except BlockingIOError:
            return
        if not chunk:
            self.output.close()
        space = KEPT_OUTPUT_BYTES - len(self.head)
        self.head += chunk[:space]
        self.tail += chunk[space:]
        if len(self.tail) > 2 * KEPT_OUTPUT_BYTES:
            self.dropped_bytes += len(self.tail) - KEPT_OUTPUT_BYTES
            del self.tail[:-KEPT_OUTPUT_BYTES]

    def ask_where(self) -> None:
        """Ask for the rank's Python stack; the answer comes as a message."""
        if not self.connection.closed:
            with contextlib.suppress(OSError):
                self.connection.send_bytes(b"where")

    def signal(self, number: int) -> None:
        """Signal the rank and what it started, such as DataLoader workers."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)
        if self.alive:  # it may not have made its group yet
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, number)

    def bury(self) -> None:
        """Take in what is still in the pipes of a rank that has ended, and forget the process."""
        self.signal(signal.SIGKILL)  # what it left behind; before join, while its pid can't be anyone else's
        while not self.connection.closed and self.connection.poll():
            self.receive()
        while not self.output.closed and self.output.poll():
            self.read_output()
        for call in left(self.memory):
            if call.end is not None or call.number not in self.calls:
                self.calls[call.number] = call
        self.process.join()
        self.exit_code = self.process.exitcode
        self.process.close()
        self.connection.close()
        self.output.close()
        self.gone = True
        if self.ended is None:
            self.ended = time.time()
            kind = "stopped" if self.stopped else "error"
            self.inbox.append(Event(self.number, self.ended, kind, {"exit_code": self.exit_code}))

    def printed(self) -> str:
        """What the rank printed, on either stream; progress bars are shown as they looked at the end."""
        gap = f"\n… {self.dropped_bytes:,} bytes left out …\n".encode() if self.dropped_bytes else b""
        text = (bytes(self.head) + gap + bytes(self.tail)).decode("utf-8", errors="backslashreplace")
        lines = text.replace("\r\n", "\n").split("\n")
        return "\n".join(line.rstrip("\r").rsplit("\r", 1)[-1] for line in lines)


@contextlib.contextmanager
def running(world_size: int, call: bytes, timeout: float | None) -> Iterator[list[Rank]]:
    """Start all ranks; on leaving, whatever happened, end every process and close every pipe and port."""
    ranks: list[Rank] = []
    with _rendezvous(timeout) as port, _folder() as folder:
        try:
            with _starting, _clean_start(_environment(0, world_size, port)):
                for number in range(world_size):
                    ranks.append(Rank(number))
            job = {"call": call, "world_size": world_size, "timeout": timeout, "port": port, "folder": folder}
            job["sources"] = transport.cell_sources()
            for rank in ranks:
                job["environment"] = {**os.environ, **_environment(rank.number, world_size, port)}
                with contextlib.suppress(OSError):  # it died while starting, which its exit code will tell
                    rank.connection.send_bytes(pickle.dumps(job))
            yield ranks
        finally:
            end(ranks)


def end(ranks: list[Rank]) -> None:
    """End the ranks that still run: SIGTERM, then SIGKILL after a second. A second interrupt doesn't cut it short."""
    with _interrupts_deferred():
        left = [rank for rank in ranks if rank.alive]
        for rank in left:
            rank.stopped = not rank.done
            rank.signal(signal.SIGTERM)
        deadline = time.monotonic() + TERM_SECONDS
        while (waiting := [r.process.sentinel for r in left if r.alive]) and time.monotonic() < deadline:
            multiprocessing.connection.wait(waiting, timeout=deadline - time.monotonic())
        for rank in left:
            rank.signal(signal.SIGKILL)
        for rank in ranks:
            if not rank.gone:
                rank.bury()


def _environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """What `torchrun` would set, for one rank of this machine."""
    without_libuv = {"USE_LIBUV": "0"} if sys.platform == "win32" else {}  # where PyTorch is built without it
    return {
        **without_libuv,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "GLOO_SOCKET_IFNAME": LOOPBACK,
        "NCCL_SOCKET_IFNAME": LOOPBACK,
        "PYTHONUNBUFFERED": "1",
    }


def _folder() -> tempfile.TemporaryDirectory:
    """Where the ranks' DataLoader workers keep their sockets, which a rank that is ended can't remove itself."""
    return tempfile.TemporaryDirectory(prefix="ddp_lab-", ignore_cleanup_errors=True)


@contextlib.contextmanager
def _rendezvous(timeout: float | None) -> Iterator[int]:
    """Host the store where ranks find each other, on a port that is ours already; yield the port.

    TCPStore alone would listen on every interface, and choosing a port before binding it is a race.
    """
    wait = worker.NEVER if timeout is None else timedelta(seconds=timeout)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        host, port = listener.getsockname()
        try:
            socket.create_connection((host, port), timeout=5).close()  # TCPStore would try for a minute
        except OSError as error:
            refusal = OSError(f"{host} can't be reached ({error}): switch the loopback interface on")
            raise calls.shown_in_one_line(refusal) from error
        with without_warnings():
            descriptor = listener.detach()
            store = dist.TCPStore(host, port, None, True, wait, wait_for_workers=False, master_listen_fd=descriptor)
    try:
        yield port
    finally:
        del store


@contextlib.contextmanager
def _clean_start(environment: dict[str, str]) -> Iterator[None]:
    """Start processes that see `environment` from their first import, and don't run the caller's script again.

    `spawn` would import `__main__` in every rank, for functions that travel by value here anyway; without that, a
    script needs no `if __name__ == "__main__"`.
    """
    before, main_module = dict(os.environ), sys.modules["__main__"]
    method = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.resource_tracker.ensure_running()  # first, as it lets interrupts through again
    # Or a process could start that no one remembers, or be interrupted in the middle of its imports.
    with _interrupts_deferred(), _blocked(signal.SIGINT):  # Jupyter and terminals send it to the whole group
        os.environ.update(environment)
        sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main_module
            os.environ.clear()
            os.environ.update(before)
            if method is None:  # starting a process fixes it, and the learner could set none any more
                multiprocessing.set_start_method(None, force=True)


@contextlib.contextmanager
def _interrupts_deferred() -> Iterator[None]:
    """Let an interrupt that comes meanwhile take effect afterwards."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread gets interrupts
        return
    late: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: late.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if late:
            signal.raise_signal(signal.SIGINT)


@contextlib.contextmanager
def interrupted_once() -> Iterator[None]:
    """Ignore Stop pressed again, which would cut short what the first one started; not for ever, if nothing ends."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    first = -math.inf

    def handler(number: int, frame: Any) -> None:
        nonlocal first
        if time.monotonic() - first > ONE_STOP_SECONDS:
            first = time.monotonic()
            before(number, frame)

    signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _blocked(number: int) -> Iterator[None]:
    """Start processes that a signal doesn't reach."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
