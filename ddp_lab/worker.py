"""What each spawned process runs: prepare the process, call the function, report, end.

Everything here runs in the rank. Messages to the notebook are pickled (tag, payload) pairs on the rank's own pipe:
a shared queue would let one killed rank take the lock that all others need.
"""

import contextlib
import faulthandler
import itertools
import multiprocessing
import multiprocessing.connection
import os
import pickle
import re
import shutil
import signal
import sys
import threading
import time
import traceback
import urllib.parse
from collections import deque
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ddp_lab import events, tracing, transport

SEND_EVERY_SECONDS = 0.1
MAX_WAITING_EVENTS = 20_000  # about 10 MB: when the notebook is slower than the rank, old metrics go first
MAX_CAUSES = 8
IN_USE = "address already in use|EADDRINUSE"
MAX_MESSAGE = 1 << 16
NEVER = timedelta(days=7)


def main(_spawn_index: int, rank: int, connection, output, memory) -> None:
    """Run one rank.

    `connection` carries the job in and messages out, `output` takes what the rank prints, and `memory` keeps
    what it called last, which must not be lost when it dies.
    """
    os.setpgid(0, 0)  # a group of its own: Jupyter interrupts the kernel's whole group
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # torch sends it when the kernel dies; _listen ends us better
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # blocked while starting
    trace = tracing.Trace(rank, memory)
    reporter = Reporter(connection, trace)
    try:
        _capture_output(output)
        job = pickle.loads(connection.recv_bytes())
        threading.Thread(target=_listen, args=(connection, reporter, job["folder"]), daemon=True).start()
        _prepare(job)
        tracing.watch_groups(trace)
        os.register_at_fork(after_in_child=connection.close)  # or a DataLoader worker would hold the pipe open
        events.set_sink(reporter.event)
        threading.excepthook = reporter.thread_failed
        reporter.event("running", {})
        fn, args, kwargs = transport.unpack_job(rank, job["call"])
        _reached.set()
        result = transport.pack_result(rank, fn(rank, job["world_size"], *args, **kwargs))
        _returned.set()
        threading._shutdown()  # a thread may still write a checkpoint: wait for it, as the end of any process does
        reporter.close("done", result)
    except BaseException as error:  # sys.exit and KeyboardInterrupt too: only "done" is success
        with contextlib.suppress(OSError):
            reporter.close("error", describe(error))
        _end(error.code & 0xFF if isinstance(error, SystemExit) and type(error.code) is int else 1)
    _end(0)


class Reporter:
    """Send events in batches from a thread of its own: training never waits for the notebook, errors never get lost."""

    def __init__(self, connection, trace: tracing.Trace):
        self.connection, self.trace = connection, trace
        self.waiting: deque[tuple[float, str, dict[str, Any]]] = deque(maxlen=MAX_WAITING_EVENTS)
        self.sending = threading.Lock()
        threading.Thread(target=self._send_regularly, daemon=True).start()

    def event(self, kind: str, data: dict[str, Any]) -> None:
        self.waiting.append((time.time(), kind, data))

    def message(self, tag: str, payload: Any) -> None:
        with self.sending:
            self.connection.send_bytes(pickle.dumps((tag, payload)))

    def close(self, tag: str, payload: Any) -> None:
        """Send the last word of this rank, after every event."""
        self.send_waiting()
        self.message(tag, (time.time(), payload))

    def thread_failed(self, failure: Any) -> None:
        """Tell of an error that ended a thread; the process goes on, as Python has it."""
        threading.__excepthook__(failure)
        if failure.exc_value is not None and not isinstance(failure.exc_value, SystemExit):
            with contextlib.suppress(OSError):
                self.message("thread", describe(failure.exc_value))

    def send_waiting(self) -> None:
        """Send the events and the calls that are not sent yet."""
        with self.sending:
            batch = []
            for _ in range(len(self.waiting)):
                when, kind, data = self.waiting.popleft()
                batch.append((when, kind, events.plain(data)))
            for tag, payload in (("events", batch), ("calls", self.trace.take())):
                if payload:
                    self.connection.send_bytes(pickle.dumps((tag, payload)))

    def _send_regularly(self) -> None:
        while True:
            time.sleep(SEND_EVERY_SECONDS)
            try:
                self.send_waiting()
            except OSError:
                return  # the notebook is gone, and so is this rank in a moment


def describe(error: BaseException, depth: int = MAX_CAUSES) -> dict[str, Any]:
    """Return an error as plain values: type, message, the frames of the learner's code, and what came before it."""
    before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    code = error.code if isinstance(error, SystemExit) else None
    return {
        "type": type(error).__qualname__,
        "message": _message(error),
        "code": code if code is None or type(code) in (int, str) else _message(code),
        "frames": _own_frames(traceback.extract_tb(error.__traceback__)),
        "notes": _notes(error),
        "refusal": getattr(error, "refusal", None) if isinstance(error, transport.Refusal) else None,
        "cause": describe(before, depth - 1) if before is not None and depth > 0 else None,
    }


def _message(error: Any) -> str:
    try:
        message = "".join(str(error))[:MAX_MESSAGE]  # join: a subclass of str may not be picklable
        return _with_holder(message) if re.search(IN_USE, message, re.IGNORECASE) else message
    except BaseException:
        return "(its message can't be shown)"


def _with_holder(message: str) -> str:
    """Say who listens on the port that is in use."""
    import psutil  # here, because only this needs it

    port = re.search(r"port\D{0,3}(\d+)|:(\d+)", message)
    number = int(next(filter(None, port.groups()))) if port else 0
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            held = [c.laddr for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN]
            if number in {address.port for address in held}:
                who = f"process {process.pid} ({process.name()})"
                return f"Address already in use: {_host(held, number)}:{number} is held by {who}"
    return message


def _host(addresses: list, port: int) -> str:
    return next(address.ip for address in addresses if address.port == port)


def _notes(error: BaseException) -> list[str]:
    """What was added with `add_note`, and the members of a group of errors."""
    members = getattr(error, "exceptions", ()) if isinstance(error, BaseExceptionGroup) else ()
    notes = [_message(note) for note in getattr(error, "__notes__", ())]
    return [*notes, *(f"contains {type(member).__qualname__}: {_message(member)}" for member in members)][:20]


def _own_frames(frames: traceback.StackSummary) -> list[tuple[str, int, str, str]]:
    """Leave out the frames that lead to the learner's function, and all of them when the lab itself refused."""
    ours = [frame.filename in (__file__, transport.__file__) for frame in frames]
    first = ours.index(True) if True in ours else 0
    shown = itertools.dropwhile(lambda pair: pair[1], list(zip(frames, ours, strict=True))[first:])
    return [(f.filename, f.lineno or 0, f.name, f.line or "") for f, _ in shown]


def _listen(connection, reporter: Reporter, folder: str) -> None:
    """Answer "where are you?", and end this rank when the notebook's process has ended.

    A thread of its own, because the main thread may be blocked in a collective, where no signal handler runs.
    """
    kernel = multiprocessing.parent_process().sentinel
    try:
        while connection in multiprocessing.connection.wait([connection, kernel]):
            connection.recv_bytes()  # there is only one question
            reporter.send_waiting()
            reporter.message("where", _where())
    except (EOFError, OSError):
        pass  # the notebook closed its end
    shutil.rmtree(folder, ignore_errors=True)  # the notebook may have been killed, which else does it
    os.killpg(0, signal.SIGKILL)  # this rank and what it started, such as DataLoader workers


_reached, _returned = threading.Event(), threading.Event()  # the learner's function


def _where() -> list[tuple[str, int, str, str]]:
    """The stack of the learner's function, or of its thread that goes on; nothing while the lab's preparations run."""
    if not _reached.is_set():
        return []
    others = [t for t in threading.enumerate() if not t.daemon and t is not threading.main_thread()]
    thread = others[0] if _returned.is_set() and others else threading.main_thread()
    return _own_frames(traceback.extract_stack(sys._current_frames().get(thread.ident)))


def _capture_output(output) -> None:
    """Send file descriptors 1 and 2 to the notebook, so that C++ output and a crash's last words are seen as well."""
    for descriptor in (1, 2):
        os.dup2(output.fileno(), descriptor)
    output.close()
    # New streams, since the old ones may believe that they write to a file or a terminal.
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        stream = open(descriptor, "w", 1, "utf-8", "backslashreplace", closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    faulthandler.enable(all_threads=False)


def _prepare(job: dict[str, Any]) -> None:
    """Make this process what `torchrun` would have made it, whatever the state of the server that forked it."""
    os.environ.clear()
    os.environ.update(job["environment"])
    # A spawned process would spawn its own DataLoader workers, slowly, and without the classes of a cell.
    multiprocessing.set_start_method(None, force=True)
    # Where this process and its children keep sockets; multiprocessing has no public way to set it.
    multiprocessing.current_process()._config["tempdir"] = job["folder"]
    transport.add_sources(job["sources"])
    threads = os.environ["OMP_NUM_THREADS"].split(",")[0]  # OpenMP knows lists, for nested loops
    torch.set_num_threads(max(1, int(threads)) if threads.isdecimal() else 1)
    _meet_at(job["port"])
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # a forked process would repeat its server's stream
    timeout = NEVER if job["timeout"] is None else timedelta(seconds=job["timeout"])
    # What init_process_group takes when its caller gives no timeout; PyTorch has no other way to set it.
    dist.distributed_c10d.default_pg_timeout = timeout
    dist.distributed_c10d.default_pg_nccl_timeout = timeout


def _meet_at(port: int) -> None:
    """Let `init_process_group` meet at the store in the notebook, whatever address it is given.

    Many scripts set MASTER_ADDR and MASTER_PORT, or pass `init_method`, with a host name that may not resolve, a port
    that may be taken, or a file of an earlier run. Each call gets keys of its own, because a group that is made after
    another one was destroyed would find that one's addresses. PyTorch has no public way to do this.
    """
    calls = itertools.count()

    def handler(url: str, timeout: timedelta = NEVER, **_: Any):
        address = urllib.parse.urlparse(url)
        query = dict(urllib.parse.parse_qsl(address.query))
        rank = int(query.get("rank", os.environ["RANK"]))
        world_size = int(query.get("world_size", os.environ["WORLD_SIZE"]))
        keys = f"/{address.scheme}/{address.netloc}{address.path}/call_{next(calls)}"
        with tracing.without_warnings():
            store = dist.TCPStore("127.0.0.1", port, None, False, timeout)
        store = dist.PrefixStore(keys, store)
        _check_place(store, rank, world_size)
        yield store, rank, world_size

    handlers = sys.modules["torch.distributed.rendezvous"]._rendezvous_handlers
    handlers.update(env=handler, tcp=handler, file=handler)


def _check_place(store: dist.Store, rank: int, world_size: int) -> None:
    """Raise ValueError in a rank that can't find its place in the group, which else would wait until the timeout."""
    mine, started = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world_size > started:
        raise ValueError(f"init_process_group waits for {world_size} ranks, and {started} ranks are too few")
    if world_size == started:
        store.set(f"place {mine}", str(rank))
        places = [int(store.get(f"place {other}")) for other in range(started)]
        if rank != mine and places.count(rank) > 1:
            raise ValueError(f"two processes called init_process_group with rank={rank}")


def _end(code: int) -> None:
    """End without the interpreter's shutdown: C++ threads of a process group abort in it now and then."""
    for child in multiprocessing.active_children():
        child.terminate()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the learner may have closed or replaced it
            stream.flush()
    os._exit(code)
