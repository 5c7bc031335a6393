"""Every collective that a rank calls: which, of what, where, from when to when. In the rank, always on.

PyTorch calls a function before and one after each collective that it issues, those that DDP issues in C++ included
(`ProcessGroup.register_pre_hook`, from 2.14 on). An older PyTorch has no such hooks: there nothing is recorded, and
a verdict rests on the ranks' stacks alone.
"""

import contextlib
import functools
import itertools
import linecache
import os
import pickle
import re
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from typing import Any

import torch
import torch.distributed as dist

from ddp_lab.stacks import NOT_THE_LEARNERS

KEPT = 4000  # calls of a rank that are remembered, in the rank until they are sent and in the notebook after that
SLOTS, SLOT_BYTES = 64, 1024  # of the memory that the notebook shares
POINT_TO_POINT = ("send", "recv")
NAMES = {  # of HookOpName, where the learner's own call shows no name
    "ALLREDUCE": "all_reduce",
    "ALLGATHER": "all_gather",
    "ALLTOALL": "all_to_all",
    "REDUCE_SCATTER": "reduce_scatter",
}
GRADIENTS, WRAPPER = "DDP's gradients", "DistributedDataParallel"


@dataclass(slots=True)
class Collective:
    """One call of a collective, or of send or recv, by one rank.

    rank: who called; number: its place among all calls of this rank, from 1; group: a key of the process group, the
    same on all its ranks; ranks: its members, empty for all; seq: its place among the group's collectives, from 1 (0
    for send and recv); op: what the backend was asked for; name: what the learner called; within: GRADIENTS, WRAPPER
    or "", whose call it was; shape, dtype: of the first tensor; elements: of all tensors that this rank brought; root:
    the rank that sends or receives for all, or -1; nth: how often this line has made this call; start, end: seconds
    since the epoch, end None while it waits; failed: it ended in an error; file, line, function: the learner's line.
    """

    rank: int
    number: int
    group: str
    ranks: tuple[int, ...]
    seq: int
    op: str
    name: str
    within: str
    shape: tuple[int, ...]
    dtype: str
    elements: int
    root: int
    nth: int
    start: float
    end: float | None
    failed: bool
    file: str
    line: int
    function: str

    @property
    def place(self) -> tuple[str, int, str, str] | None:
        """The learner's line as a frame of `stacks`; None where no line of Python led to the call."""
        if not self.file:
            return None
        return self.file, self.line, self.function, linecache.getline(self.file, self.line).strip()


class Trace:
    """The calls of this rank that were not sent yet, and what is needed to record the next ones."""

    def __init__(self, rank: int, memory: Any = None):
        self.rank, self.memory = rank, memory
        self.numbers = itertools.count(1)
        self.made: Counter = Counter()
        self.times: Counter = Counter()  # process groups made, by name: one may be destroyed and made again
        self.unsent: deque[Collective] = deque(maxlen=KEPT)
        self.waiting: list[tuple[Collective, Any]] = []  # those whose end nobody announces
        self.looking = threading.Lock()

    def attach(self, group: dist.ProcessGroup, ranks: tuple[int, ...]) -> None:
        """Record what is called on this group from now on."""
        named = group.group_desc not in ("", "default_pg", "undefined")
        name = f"{group.group_name} {group.group_desc}" if named else f"{group.group_name}"
        self.times[name] += 1
        key = name if self.times[name] == 1 else f"{name} made again ({self.times[name]})"
        seq, issued = itertools.count(1), {}

        def before(call: Any) -> None:
            with contextlib.suppress(Exception):  # never let a record cost the learner a collective
                issued[call.op_id] = self._record(call, key, ranks, seq)

        def after(call: Any) -> None:
            with contextlib.suppress(Exception):
                self._follow(issued.pop(call.op_id), call.work)

        group.register_pre_hook(id(self), before)
        group.register_post_hook(id(self), after)

    def _record(self, call: Any, key: str, ranks: tuple[int, ...], seq: itertools.count) -> Collective:
        name, within, file, line, function = _caller(sys._getframe(1).f_back)
        op = NAMES.get(call.name.name, call.name.name.lower())
        tensors = call.input_tensors or call.output_tensors
        elements = sum(map(torch.numel, tensors))
        kind = (file, line, within, op, key, elements)
        self.made[kind] += 1
        made = Collective(
            rank=self.rank,
            number=next(self.numbers),
            group=key,
            ranks=ranks,
            seq=0 if op in POINT_TO_POINT else next(seq),
            op=op,
            name=name or op,
            within=within,
            shape=tuple(tensors[0].shape) if tensors else (),
            dtype=_dtype(tensors[0].dtype) if tensors else "",
            elements=elements,
            root=ranks[call.root] if 0 <= call.root < len(ranks) else call.root,
            nth=self.made[kind],
            start=time.time(),
            end=None,
            failed=False,
            file=file,
            line=line,
            function=function,
        )
        self._keep(made)
        return made

    def _keep(self, made: Collective) -> None:
        self.unsent.append(made)
        if self.memory is not None:
            leave(self.memory, made)

    def _follow(self, made: Collective, work: Any) -> None:
        """Note when the call ends.

        On the CPU its future says so. Of a GPU's work the future only says that it was queued; send and recv have none.
        """
        if work is None:
            self._end(made)
        elif made.op in POINT_TO_POINT or torch.cuda.is_initialized():
            with self.looking:
                self.waiting.append((made, work))
        else:
            work.get_future().add_done_callback(functools.partial(self._end, made))

    def _end(self, made: Collective, future: Any = None) -> None:
        try:
            if future is not None:
                future.value()  # raises what the call raised
            made.end = None if made.failed else time.time()
        except Exception:
            made.failed = True
        self._keep(made)

    def look(self) -> None:
        """Note the ends that nobody announces; between two calls of this lies how exact they are."""
        with self.looking:
            waiting, self.waiting = self.waiting, []
            for made, work in waiting:
                if work.is_completed():
                    made.failed = made.op in POINT_TO_POINT and not work.is_success()
                    self._end(made)
                else:
                    self.waiting.append((made, work))

    def take(self) -> list[tuple]:
        """Return what is new since the last call, as plain tuples: calls that began, and calls that ended."""
        self.look()
        new = {}
        for _ in range(len(self.unsent)):
            made = self.unsent.popleft()
            new[made.number] = made
        return [astuple(made) for made in new.values()]


def leave(memory: Any, call: Collective) -> None:
    """Write a call to memory that the notebook shares: a rank that dies in the call can't send it any more."""
    plain = pickle.dumps(astuple(call))
    if len(plain) <= SLOT_BYTES - 4:
        slot = call.number % SLOTS * SLOT_BYTES
        memory[slot : slot + len(plain) + 4] = len(plain).to_bytes(4, "little") + plain


def left(memory: Any) -> list[Collective]:
    """Read the calls that `leave` wrote, as far as they are whole."""
    found = []
    for slot in range(0, SLOTS * SLOT_BYTES, SLOT_BYTES):
        length = int.from_bytes(memory[slot : slot + 4], "little")
        with contextlib.suppress(Exception):  # the rank died while it wrote
            found += [Collective(*pickle.loads(memory[slot + 4 : slot + 4 + length]))] if length else []
    return found


def watch_groups(trace: Trace) -> None:
    """Attach `trace` to every process group that this process makes from now on.

    PyTorch has no public way to learn of them: `init_process_group` and `new_group` both pass through this function.
    """
    make = dist.distributed_c10d._new_process_group_helper
    with without_warnings():
        dist.Work().is_success()  # says once in a process that it is deprecated; nothing else tells of a failed send

    @functools.wraps(make)
    def made(group_size: int, group_rank: Any, global_ranks: Any, *args: Any, **kwargs: Any):
        group, store = make(group_size, group_rank, global_ranks, *args, **kwargs)
        if hasattr(group, "register_pre_hook"):
            trace.attach(group, tuple(global_ranks or ()))
        return group, store

    dist.distributed_c10d._new_process_group_helper = made


_hushed = threading.Lock()


@contextlib.contextmanager
def without_warnings() -> Iterator[None]:
    """Drop what PyTorch's C++ prints for nothing; what is really wrong is raised as an error, too.

    TCPStore warns where the name of 127.0.0.1 can't be looked up, as without network.
    """
    with _hushed:
        kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 2)
        os.close(nowhere)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)


def _caller(frame: Any) -> tuple[str, str, str, int, str]:
    """Return (name of the torch.distributed function called, GRADIENTS or WRAPPER or "", file, line, function)."""
    name, within = "", "" if frame is not None else GRADIENTS  # autograd's own thread for a GPU has no frame of Python
    while frame is not None:
        file = frame.f_code.co_filename
        kind = _kind(file)
        if kind == "learner":
            return name, within, file, frame.f_lineno, frame.f_code.co_name
        if kind == "distributed" and not frame.f_code.co_name.startswith("_") and frame.f_code.co_name != "wrapper":
            name = frame.f_code.co_name
        elif kind in (GRADIENTS, WRAPPER):
            within = kind
        frame = frame.f_back
    return name, within, "", 0, ""


@functools.cache
def _kind(file: str) -> str:
    if not NOT_THE_LEARNERS.search(file):
        return "learner"
    if re.search(r"torch[/\\](autograd[/\\]|_tensor\.py)", file):
        return GRADIENTS
    if re.search(r"torch[/\\]nn[/\\]parallel[/\\]distributed\.py", file):
        return WRAPPER
    return "distributed" if re.search(r"torch[/\\]distributed[/\\]", file) else ""


@functools.cache
def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
