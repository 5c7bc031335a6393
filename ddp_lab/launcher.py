"""`launch`: run a function as ranks, watch them, and return what they return or say why they could not."""

import inspect
import math
import multiprocessing.connection
import operator
import pickle
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import psutil

from ddp_lab import diagnosis, processes, transport
from ddp_lab.devices import choose_backend
from ddp_lab.events import Event, EventLog
from ddp_lab.processes import Rank, fast_start

__all__ = ["Run", "fast_start", "launch"]

TICK_SECONDS = 0.1
GRACE_SECONDS = 0.5  # after a failure: long enough for the other ranks to say what they met
LONG_GRACE_SECONDS = 1.2  # when only victims have spoken so far
STACK_SECONDS = 0.5  # a rank that has not finished importing can't answer
BYTES_PER_RANK = 300 << 20
SHOWN_LINES = 400


@dataclass
class Run:
    """What a launch leaves.

    results: what each rank returned, None where it returned nothing or failed; exit_codes: one per rank, None while
    it runs; log: every event, in the order of arrival; seconds: from the call of `launch` to the end.
    """

    world_size: int
    log: EventLog = field(default_factory=EventLog)
    results: list[Any] = field(default_factory=list)
    exit_codes: list[int | None] = field(default_factory=list)
    seconds: float = 0.0
    outcome: str = "running"
    outputs: list[str] = field(default_factory=list)

    def output(self, rank: int) -> str:
        """What one rank printed. Of very long output the beginning and the end."""
        return self.outputs[rank]

    def plot_loss(self):
        """Return a matplotlib figure: the loss of every rank, and its mean over the ranks."""
        from ddp_lab import figures  # here, because importing ddp_lab must not import matplotlib

        return figures.loss(self.log)

    def __repr__(self) -> str:
        return f"Run({self.world_size} rank{'' if self.world_size == 1 else 's'}, {self.outcome})"


def launch(
    fn: Callable[..., Any],
    *args: Any,
    world_size: int = 2,
    timeout: float | None = 60.0,
    on_event: Callable[[Event], None] | str | None = "auto",
    **kwargs: Any,
) -> Run:
    """Call `fn(rank, world_size, *args, **kwargs)` in `world_size` new processes and return a `Run`.

    The call returns when every process has ended. `fn` and its arguments travel by value: functions from cells work,
    and the notebook's own objects stay as they were. In each rank `torch.distributed.init_process_group(backend)`
    needs no address, as under `torchrun`.

    timeout: seconds a rank may wait inside one collective, None for no limit; it does not limit the run.
    on_event: "auto" shows the dashboard (in a terminal, a progress display), None shows nothing, and a function gets
    every Event as it arrives. An object with `tick()` and `close(run)` has them called ten times a second and at the
    end.

    Raises TypeError or ValueError before any process starts (the arguments); `RankError` when a rank failed;
    `Interrupted`, a KeyboardInterrupt, when the learner pressed Stop. The latter two have the `run` so far.
    Source of the contract: https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables
    """
    try:
        world_size = check_call(fn, args, kwargs, world_size, timeout)
        call = transport.pack_job(fn, args, kwargs)
        display = _display(on_event, world_size)
    except (TypeError, ValueError) as refusal:
        raise diagnosis.shown_in_one_line(refusal) from refusal.__cause__
    run = Run(world_size)
    started = time.monotonic()
    ranks: list[Rank] = []
    try:
        with processes.running(world_size, call, timeout) as ranks:
            try:
                _watch(ranks, run.log, display)
            except KeyboardInterrupt:
                _ask_where(ranks, wait=True)
                raise
    except KeyboardInterrupt as interrupt:
        raise _interrupted(run, ranks) from interrupt
    else:
        verdict = _collect(run, ranks, timeout)
    finally:
        run.seconds = time.monotonic() - started
        getattr(display, "close", lambda run: None)(run)
        _show_output(run)
    if verdict:
        error = diagnosis.RankError(verdict)
        error.run = run
        raise error
    return run


def check_call(fn, args: tuple, kwargs: dict[str, Any], world_size: Any, timeout: Any) -> int:
    """Return world_size as an int. Raises TypeError or ValueError for a call that can't work, naming the culprit."""
    if not callable(fn):
        raise TypeError(
            f"launch needs a function, and got a {type(fn).__name__}: write launch(train), not launch(train())"
        )
    try:
        world_size = operator.index(world_size)
    except TypeError:
        raise TypeError(
            f"world_size={world_size!r} is not a whole number: give the number of ranks, such as 2"
        ) from None
    if world_size < 1:
        raise ValueError(f"world_size={world_size} starts no rank: use 1 or more")
    total = psutil.virtual_memory().total
    if world_size * BYTES_PER_RANK > total and world_size > 1:
        raise ValueError(
            f"world_size={world_size} needs about {world_size * BYTES_PER_RANK / 2**30:.0f} GiB of memory and this "
            f"machine has {total / 2**30:.0f}: use at most {max(1, total // BYTES_PER_RANK)} ranks"
        )
    if timeout is not None and not (isinstance(timeout, int | float) and timeout > 0):
        raise ValueError(f"timeout={timeout!r} is not a number of seconds above 0: give one, or None for no limit")
    _check_signature(fn, args, kwargs, world_size)
    return world_size


def _check_signature(fn, args: tuple, kwargs: dict[str, Any], world_size: int) -> None:
    name = transport.fn_name(fn)
    try:
        signature = inspect.signature(fn)
    except ValueError:
        return  # some functions written in C have none to look at
    try:
        bound = signature.bind(0, world_size, *args, **kwargs)
    except TypeError as error:
        given = ["rank", "world_size", *map(repr, args), *(f"{key}={value!r}" for key, value in kwargs.items())]
        shown = ", ".join(part if len(part) < 40 else part[:37] + "…" for part in given)
        raise TypeError(
            f"each rank would call {name}({shown}), but the function is {name}{signature} ({error}): "
            "let its first two parameters take rank and world_size"
        ) from None
    if inspect.isgeneratorfunction(fn) or inspect.iscoroutinefunction(fn):
        raise TypeError(
            f"{name} is a generator or async function, whose body a plain call does not run: use a plain def"
        )
    backend = bound.arguments.get("backend")
    if isinstance(backend, str):
        choose_backend(world_size, backend)


def _display(on_event: Any, world_size: int) -> Callable[[Event], None] | None:
    """Turn launch's `on_event` into a callable; imports what draws only where there is someone to look."""
    if callable(on_event) or on_event is None:
        return on_event
    if on_event != "auto":
        raise TypeError(f"on_event={on_event!r} is neither a function, nor None, nor 'auto'")
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    if hasattr(shell, "kernel"):
        from ddp_lab.dashboard import Dashboard

        return Dashboard(world_size)
    if sys.stderr.isatty():
        from ddp_lab.terminal import TerminalDisplay

        return TerminalDisplay(world_size)
    return None


def _watch(ranks: list[Rank], log: EventLog, display: Callable[[Event], None] | None) -> None:
    """Take in what the ranks send until all have ended, or until one has failed and the others had time to speak."""
    tick = getattr(display, "tick", lambda: None)
    _tell([Event(rank.number, time.time(), "starting") for rank in ranks], log, display)
    give_up = math.inf
    while not all(rank.gone for rank in ranks):
        _hear(ranks)
        _tell([event for rank in ranks for event in rank.take()], log, display)
        tick()
        failed = [rank for rank in ranks if rank.failed]
        if failed and give_up == math.inf:
            give_up = time.monotonic() + LONG_GRACE_SECONDS
            _ask_where(ranks)
        if any(not diagnosis.is_victim(_report(rank)) for rank in failed):
            give_up = min(give_up, time.monotonic() + GRACE_SECONDS)
        if time.monotonic() >= give_up:
            return


def _hear(ranks: list[Rank], seconds: float = TICK_SECONDS) -> None:
    """Wait until something comes, at most `seconds`, and take it in; a rank's end comes last, after its words."""
    sources = {}
    for rank in ranks:
        sources.update({rank.connection: rank.receive} if not rank.connection.closed else {})
        sources.update({rank.output: rank.read_output} if not rank.output.closed else {})
    sources.update({rank.process.sentinel: rank.bury for rank in ranks if not rank.gone})
    ready = multiprocessing.connection.wait(list(sources), timeout=seconds)
    for source in sources:
        if source in ready:
            sources[source]()


def _ask_where(ranks: list[Rank], wait: bool = False) -> None:
    """Ask the ranks that still run for their Python stacks."""
    asked = [rank for rank in ranks if not rank.gone and rank.ended is None]
    for rank in asked:
        rank.ask_where()
    deadline = time.monotonic() + STACK_SECONDS
    while wait and any(rank.where is None for rank in asked) and time.monotonic() < deadline:
        _hear(ranks)


def _tell(new: list[Event], log: EventLog, display: Callable[[Event], None] | None) -> None:
    for event in new:
        log.append(event)
        if display is not None:
            display(event)


def _report(rank: Rank) -> diagnosis.RankReport:
    return diagnosis.RankReport(
        rank.number,
        exit_code=rank.exit_code,
        ended=rank.ended or 0.0,
        done=rank.done,
        stopped=rank.stopped and rank.error is None,
        error=rank.error,
        where=rank.where,
        printed=rank.printed(),
    )


def _collect(run: Run, ranks: list[Rank], timeout: float | None) -> diagnosis.Verdict | None:
    """Fill in what the ranks left; return the verdict, if any of them failed."""
    _tell([event for rank in ranks for event in rank.take()], run.log, None)
    run.exit_codes = [rank.exit_code for rank in ranks]
    run.outputs = [rank.printed() for rank in ranks]
    run.results = [pickle.loads(rank.result) if rank.done else None for rank in ranks]
    verdict = diagnosis.diagnose([_report(rank) for rank in ranks], timeout, transport.cell_names())
    run.outcome = f"failed on rank {verdict.rank}" if verdict else "finished"
    return verdict


def _interrupted(run: Run, ranks: list[Rank]) -> diagnosis.Interrupted:
    _collect(run, ranks, None)
    run.outcome = "interrupted"
    error = diagnosis.Interrupted(f"stopped by you; all {run.world_size} ranks have ended")
    error.run = run
    error.details = diagnosis.details([_report(rank) for rank in ranks], transport.cell_names())
    return error


def _show_output(run: Run) -> None:
    """Print what the ranks printed, in rank order, so that a cell's saved output is the same every time."""
    for rank, text in enumerate(run.outputs):
        lines = diagnosis.without_fault_dump(text).splitlines()
        if len(lines) > SHOWN_LINES:
            left_out = f"… {len(lines) - SHOWN_LINES:,} lines left out, see run.output({rank}) …"
            lines = [*lines[: SHOWN_LINES // 2], left_out, *lines[-SHOWN_LINES // 2 :]]
        for line in lines:
            print(f"[rank {rank}] {line}")
