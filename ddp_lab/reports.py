"""What each rank left behind: its error, whether it was a victim, and the lines that tell of it. Pure.

The first error to arrive is often a victim's: a rank whose neighbour died reports a lost connection.
"""

import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from ddp_lab import mismatch, stacks
from ddp_lab.stacks import OWN_CODE, Frame, collective, gist, place
from ddp_lab.tracing import Collective

LOST_CONNECTION = re.compile(
    r"connection closed by peer|connection reset by peer|broken pipe|connection refused|socket closed|"
    r"remote process exited|communicator was aborted|failed to recv",
    re.IGNORECASE,
)
TIMED_OUT = re.compile(r"timed out|timeout|failed to pass monitoredBarrier", re.IGNORECASE)
FROM_A_BACKEND = re.compile(r"gloo|nccl|c10d|tcpstore|monitoredBarrier", re.IGNORECASE)
WRONG_SIZE = re.compile(r"EnforceNotMet|received data size", re.IGNORECASE)
TORCH_ERRORS = ("RuntimeError", "DistBackendError", "DistNetworkError", "DistStoreError", "DistError")


@dataclass(frozen=True)
class RankReport:
    """What is known of one rank when the run has ended.

    ended: seconds since the epoch; error: `worker.describe`, if it reported one; stopped: the lab ended it;
    where: its Python stack, outermost frame first, if the lab asked; calls: the collectives that it called;
    thread_error: the first error that ended one of its threads.
    """

    rank: int
    exit_code: int | None = None
    ended: float = 0.0
    done: bool = False
    stopped: bool = False
    error: dict[str, Any] | None = None
    where: list[Frame] | None = None
    printed: str = ""
    calls: list[Collective] = field(default_factory=list)
    thread_error: dict[str, Any] | None = None


def is_victim(report: RankReport) -> bool:
    """A rank that lost its peers, or waited for them in vain, is not where to look first."""
    return report.error is not None and own_error(report.error) is None


def chain_of(error: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """An error and those that came before it."""
    while error:
        yield error
        error = error["cause"]


def own_error(error: dict[str, Any]) -> dict[str, Any] | None:
    """The error to blame this rank for, if any.

    An error of its own, followed by a lost connection while cleaning up, is its own; a lost connection that the
    learner's code turned into another error is still a victim's.
    """
    chain = list(chain_of(error))
    if not any(map(_is_loss, chain)):
        return error
    after = chain[[_is_loss(each) for each in chain].index(True) :]
    return next((each for each in after if not _is_loss(each)), None)


def loss_of(error: dict[str, Any]) -> dict[str, Any]:
    """The lost connection or timeout in a victim's errors."""
    return next(filter(_is_loss, chain_of(error)))


def _is_loss(error: dict[str, Any]) -> bool:
    message = error["message"]
    if error["type"] not in TORCH_ERRORS or not (LOST_CONNECTION.search(message) or TIMED_OUT.search(message)):
        return False
    return collective(error["frames"]) != OWN_CODE or bool(FROM_A_BACKEND.search(message))


def timed_out(report: RankReport) -> bool:
    """Whether a victim waited in vain, rather than lost a peer."""
    return bool(TIMED_OUT.search(loss_of(report.error)["message"]))


def failed_in_a_collective(report: RankReport) -> bool:
    """Whether it failed in what PyTorch does with other ranks: then a difference between them explains more."""
    if report.error is None:
        return bool(WRONG_SIZE.search(report.printed))
    error = own_error(report.error)
    return error["type"] in TORCH_ERRORS and collective(error["frames"]) != OWN_CODE


def said(error: dict[str, Any]) -> str:
    """An error in one line, as Python ends a traceback."""
    gist_of_it = gist(error["message"])
    if not gist_of_it or gist_of_it.startswith(error["type"]):
        return gist_of_it or error["type"]
    return f"{error['type']}: {gist_of_it}"


def seconds(waiting: RankReport, timeout: float | None) -> str:
    """How long the rank waited: what its own error says, because a group can have a timeout of its own."""
    told = re.search(r"(\d+) ?(?:ms|milliseconds)", loss_of(waiting.error)["message"])
    length = int(told.group(1)) / 1000 if told else timeout
    return f"{length:g} s" if length else "too long"


def frames_of(report: RankReport) -> list[Frame]:
    """Where a rank was when it failed, or when it was asked."""
    return report.error["frames"] if report.error else report.where or []


def standing(report: RankReport, names: dict[str, str]) -> str:
    """Where a rank stands at the end, in a few words."""
    if report.done:
        return "returned"
    if report.error and not report.stopped:
        loss = None if own_error(report.error) else loss_of(report.error)
        what = report.error["type"] if not loss else "timed out" if timed_out(report) else "lost its connection"
        at = place((loss or own_error(report.error))["frames"], names)
        return f"{what}{at}"
    if report.stopped:
        return f"was{place(report.where or [], names) or ' starting'}, ended by the lab"
    code = report.exit_code
    return f"died of {signal_name(code)}" if code and code < 0 else f"ended with exit code {code}"


def signal_name(exit_code: int) -> str:
    """Name the signal that ended a process, which its exit code is the negative of."""
    try:
        return signal.Signals(-exit_code).name
    except ValueError:
        return f"signal {-exit_code}"


def details(reports: list[RankReport], names: dict[str, str]) -> list[str]:
    """What each rank did, line by line."""
    return [line for report in reports for line in _detail(report, names)]


def _detail(report: RankReport, names: dict[str, str]) -> list[str]:
    """Lines on one rank for whoever wants to know more."""
    if report.thread_error:
        in_thread = [f"Rank {report.rank}, in a thread: {said(report.thread_error)}"]
        in_thread += _error_lines(report.thread_error, names)
        return in_thread + _detail(replace(report, thread_error=None), names)
    if report.error:
        head = f"{_consequence(report)}" if is_victim(report) else said(report.error)
        return [f"Rank {report.rank}: {head}", *_error_lines(report.error, names)]
    if report.done:
        return [f"Rank {report.rank}: finished"]
    if not report.stopped:
        last = stacks.without_fault_dump(report.printed).strip().splitlines()[-8:]
        head = f"Rank {report.rank}: exit code {report.exit_code}"
        return [head, *_last_call(report, names), *(f"    {gist(line)}" for line in last)]
    if report.where == []:
        return [f"Rank {report.rank}: ended by the lab, before it reached your function"]
    frames = stacks.lines(report.where, names) if report.where else []
    who = "a thread of its own" if frames and report.where[0][2] == "_bootstrap" else "it"
    return [f"Rank {report.rank}: ended by the lab{f', when {who} was here' if frames else ''}", *frames]


def _last_call(report: RankReport, names: dict[str, str]) -> list[str]:
    call = mismatch.unfinished(report.calls[-1:])
    return [f"  in {mismatch.said(call, names)}"] if call else []


def _consequence(report: RankReport) -> str:
    loss = loss_of(report.error)
    where = f" in {collective(loss['frames'])}"
    if LOST_CONNECTION.search(loss["message"]):
        return f"as a consequence, it lost its connection{where}"
    return f"waited {seconds(report, None)} for another rank{where}"


def _error_lines(error: dict[str, Any], names: dict[str, str]) -> list[str]:
    """The learner's stack, what was noted, and the errors that came before."""
    notes = [f"    {gist(note)}" for note in error["notes"]]
    earlier = [f"    after {said(each)}{place(each['frames'], names)}" for each in list(chain_of(error))[1:]]
    return [*stacks.lines(error["frames"], names), *notes, *earlier]
