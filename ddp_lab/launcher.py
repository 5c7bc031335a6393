"""`launch`: run a function as ranks, watch them, and return what they return or say why they could not."""

import math
import multiprocessing.connection
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ddp_lab import calls, diagnosis, mismatch, processes, reports, stacks, transport
from ddp_lab.charts import count
from ddp_lab.events import Event, EventLog
from ddp_lab.processes import Rank, fast_start
from ddp_lab.tracing import Collective

__all__ = ["Run", "fast_start", "launch"]

TICK_SECONDS = 0.1
GRACE_SECONDS = 0.5  # after a failure: long enough for the other ranks to say what they met
LONG_GRACE_SECONDS = 1.2  # when only victims have spoken so far
STUCK_SECONDS = 1.0  # after which a call that can't end is not waited for any longer
STACK_SECONDS = 0.5  # a rank that has not finished importing can't answer
SHOWN_LINES = 400


@dataclass
class Run:
    """What a launch leaves.

    results: what each rank returned, None where it returned nothing or failed; exit_codes: one per rank, None while
    it runs; log: every event, in the order of arrival; seconds: from the call of `launch` to the end; trace: the
    collectives that each rank called, the latest 4,000 of each, by rank and in the order of its calls; ends: where each
    rank stood at the end, in words.
    """

    world_size: int
    log: EventLog = field(default_factory=EventLog)
    results: list[Any] = field(default_factory=list)
    exit_codes: list[int | None] = field(default_factory=list)
    seconds: float = 0.0
    outcome: str = "running"
    outputs: list[str] = field(default_factory=list)
    trace: list[Collective] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)

    def output(self, rank: int) -> str:
        """What one rank printed. Of very long output the beginning and the end."""
        return self.outputs[rank]

    def plot_loss(self):
        """Return a matplotlib figure: the loss of every rank, and its mean over the ranks."""
        from ddp_lab import figures  # here, because importing ddp_lab must not import matplotlib

        return figures.loss(self.log)

    def plot_trace(self, last: int = 5):
        """Return a matplotlib figure: the `last` collectives, who came when, and where each rank stood at the end."""
        from ddp_lab import spacetime

        return spacetime.picture(self.trace, self.ends, last)

    def __repr__(self) -> str:
        return f"Run({count(self.world_size, 'rank')}, {self.outcome})"


def launch(
    fn: Callable[..., Any],
    /,
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
        world_size, timeout = calls.check(fn, args, kwargs, world_size, timeout, on_event)
        call = transport.pack_job(fn, args, kwargs)
    except (TypeError, ValueError) as refusal:
        raise calls.shown_in_one_line(refusal) from refusal.__cause__
    with processes.interrupted_once():
        return _run(call, world_size, timeout, on_event)


def _run(call: bytes, world_size: int, timeout: float | None, on_event: Any) -> Run:
    run = Run(world_size)
    started = time.monotonic()
    ranks: list[Rank] = []
    display = None
    try:
        with processes.running(world_size, call, timeout) as ranks:
            try:
                display = _display(on_event, world_size)  # its imports take a second, in which the ranks start
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
        _close(display, run)
        _show_output(run)
    if verdict:
        error = diagnosis.RankError(verdict)
        error.run = run
        raise error
    return run


def _display(on_event: Any, world_size: int) -> Callable[[Event], None] | None:
    """Turn launch's `on_event` into a callable; imports what draws only where there is someone to look."""
    if on_event != "auto":
        return on_event
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
        if give_up == math.inf and _stuck(ranks):
            give_up = time.monotonic() + GRACE_SECONDS
            _ask_where(ranks)
        if any(not reports.is_victim(_report(rank)) for rank in failed):
            give_up = min(give_up, time.monotonic() + GRACE_SECONDS)
        if time.monotonic() >= give_up:
            return


def _stuck(ranks: list[Rank]) -> bool:
    """Whether a rank waits in a call that another rank answered with a different one: it would wait until `timeout`."""
    latest = [call for rank in ranks if (call := mismatch.unfinished(list(rank.calls.values())[-1:]))]
    if not any(call.start < time.time() - STUCK_SECONDS for call in latest):
        return False
    parting = mismatch.first_parting({rank.number: _calls(rank) for rank in ranks}, tolerant=True)
    return parting is not None and None in (parting.call.end, parting.other.end)


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


def _report(rank: Rank) -> reports.RankReport:
    return reports.RankReport(
        rank.number,
        exit_code=rank.exit_code,
        ended=rank.ended or 0.0,
        done=rank.done,
        stopped=rank.stopped and rank.error is None,
        error=rank.error,
        where=rank.where,
        printed=rank.printed(),
        calls=_calls(rank),
        thread_error=rank.thread_error,
    )


def _calls(rank: Rank) -> list[Collective]:
    return [rank.calls[number] for number in sorted(rank.calls)]


def _collect(run: Run, ranks: list[Rank], timeout: float | None) -> diagnosis.Verdict | None:
    """Fill in what the ranks left; return the verdict, if any of them failed."""
    _tell([event for rank in ranks for event in rank.take()], run.log, None)
    run.exit_codes = [rank.exit_code for rank in ranks]
    run.outputs = [rank.printed() for rank in ranks]
    run.trace = [call for rank in ranks for call in _calls(rank)]
    unusable = None
    for rank in ranks:
        try:
            run.results.append(transport.unpack_result(rank.number, rank.result) if rank.done else None)
        except transport.Refusal as refusal:
            run.results.append(None)
            unusable = diagnosis.Verdict("result", rank.number, *refusal.refusal)
    left, names = [_report(rank) for rank in ranks], transport.cell_names()
    run.ends = [reports.standing(report, names) for report in left]
    verdict = diagnosis.diagnose(left, timeout, names) or unusable
    run.outcome = f"failed on rank {verdict.rank}" if verdict else "finished"
    return verdict


def _interrupted(run: Run, ranks: list[Rank]) -> diagnosis.Interrupted:
    _collect(run, ranks, None)
    run.outcome = "interrupted"
    ended = f"all {run.world_size} ranks have" if run.world_size > 1 else "the rank has"
    error = diagnosis.Interrupted(f"stopped by you; {ended} ended")
    error.run = run
    error.details = reports.details([_report(rank) for rank in ranks], transport.cell_names())
    return error


def _close(display: Any, run: Run) -> None:
    """Let the display show the end; a failure there must not cost the run's result, or its error."""
    try:
        getattr(display, "close", lambda run: None)(run)
    except Exception as error:
        warnings.warn(f"the display could not be closed ({type(error).__name__}: {error})", stacklevel=3)


def _show_output(run: Run) -> None:
    """Print what the ranks printed, in rank order, so that a cell's saved output is the same every time."""
    for rank, text in enumerate(run.outputs):
        lines = stacks.without_fault_dump(text).splitlines()
        if len(lines) > SHOWN_LINES:
            left_out = f"… {len(lines) - SHOWN_LINES:,} lines left out, see run.output({rank}) …"
            lines = [*lines[: SHOWN_LINES // 2], left_out, *lines[-SHOWN_LINES // 2 :]]
        for line in lines:
            _print(f"[rank {rank}] {line}")


def _print(line: str) -> None:
    try:
        print(line)
    except UnicodeEncodeError:  # a terminal that does not know all characters
        known = sys.stdout.encoding or "ascii"
        print(line.encode(known, "backslashreplace").decode(known))
