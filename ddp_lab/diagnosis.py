"""From what each rank left behind to one sentence: which rank, what, where, why, and the cure.

Pure: plain values in, a verdict out, no process and no clock. The first error to arrive is often a victim's: a rank
whose neighbour died reports a lost connection. So a rank is blamed for its own error or death first, and for a lost
connection or a timeout only when nothing else explains it.
"""

import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from ddp_lab import mismatch, stacks
from ddp_lab.mismatch import SAME_CALLS
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
TRACE_CURE = "the traceback below shows how it came there"
SIGNAL_MEANS = {
    "SIGKILL": (
        "sent from outside, most likely by the system because memory ran out",
        "use fewer ranks, a smaller batch or a smaller model",
    ),
    "SIGSEGV": ("a crash in compiled code", "check what that line passes to compiled code"),
    "SIGABRT": ("compiled code gave up", "its last printed lines say why"),
    "SIGBUS": (
        "most likely because shared memory (/dev/shm) ran out",
        "use num_workers=0 in its DataLoader, or enlarge /dev/shm",
    ),
    "SIGTERM": ("sent by something outside the lab", "look for the program that sends SIGTERM"),
}


@dataclass(frozen=True)
class RankReport:
    """What is known of one rank when the run has ended.

    ended: seconds since the epoch; error: `worker.describe`, if it reported one; stopped: the lab ended it;
    where: its Python stack, outermost frame first, if the lab asked; calls: the collectives that it called.
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


@dataclass(frozen=True)
class Verdict:
    """kind: "error", "exit", "death", "mismatch", "hang" or "result"; rank: the rank to blame; why: one sentence."""

    kind: str
    rank: int
    why: str
    cure: str
    details: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.why}: {self.cure}."


class RankError(RuntimeError):
    """A rank failed, died, or waited in vain. Fields: `rank`, `kind`, `why`, `cure`, `details`.

    `run` holds what there is: the log, the output, the results of the ranks that finished.
    """

    run: Any = None

    def __init__(self, verdict: Verdict):
        super().__init__(str(verdict))
        self.verdict = verdict
        self.rank, self.kind, self.why, self.cure = verdict.rank, verdict.kind, verdict.why, verdict.cure
        self.details = verdict.details
        self.add_note("\n".join(verdict.details))  # which a terminal shows under the traceback

    def _render_traceback_(self) -> list[str]:
        """What IPython shows instead of the launcher's own traceback, which explains nothing."""
        return [f"{type(self).__name__}: {self}", *self.details]


class Interrupted(KeyboardInterrupt):
    """The learner pressed Stop. `run` holds what there is, `details` where each rank was."""

    run: Any = None
    details: tuple[str, ...] | list[str] = ()

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self}", *self.details]


def shown_in_one_line(error: Exception) -> Exception:
    """Let IPython show an error of the learner's call without the lab's own traceback."""
    error._render_traceback_ = lambda: [f"{type(error).__name__}: {error}"]
    return error


def diagnose(reports: list[RankReport], timeout: float | None, cells: dict[str, str] | None = None) -> Verdict | None:
    """Return the verdict on a run, or None when every rank said "done".

    timeout: seconds that a rank may wait in one collective; cells: the notebook's name of each cell's file.
    """
    names = cells or {}
    failed = sorted((r for r in reports if not r.done and not r.stopped), key=lambda r: r.ended)
    verdict = _verdict(failed, reports, timeout, names) if failed else _unnoticed(reports, names)
    return verdict and replace(verdict, details=details(reports, names))


def _verdict(failed: list[RankReport], reports: list[RankReport], timeout: float | None, names: dict) -> Verdict:
    parting = mismatch.first_parting(_calls(reports))
    own = [r for r in failed if not is_victim(r)]
    if own and not (parting and _in_a_collective(own[0])):
        return _blame(own[0], names)
    if parting:
        return _parted(parting, reports, names)
    timed_out = [r for r in failed if TIMED_OUT.search(_lost(r.error)["message"])]
    if timed_out:
        return _hang(min(timed_out, key=lambda r: r.rank), reports, timeout, names)
    return _left_alone(min(failed, key=lambda r: r.rank), reports, names)


def _calls(reports: list[RankReport]) -> mismatch.Calls:
    return {report.rank: report.calls for report in reports}


def _in_a_collective(report: RankReport) -> bool:
    """Whether it failed in what PyTorch does with other ranks: then a difference between them explains more."""
    if report.error is None:
        return bool(WRONG_SIZE.search(report.printed))
    error = _own_error(report.error)
    return error["type"] in TORCH_ERRORS and collective(error["frames"]) != OWN_CODE


def _parted(parting: mismatch.Parting, reports: list[RankReport], names: dict[str, str]) -> Verdict:
    call, other, calls = parting.call, parting.other, _calls(reports)
    why = f"Rank {call.rank} called {mismatch.said(call, names)} where rank {other.rank} called "
    counts = mismatch.tally(other, calls) or mismatch.tally(call, calls)
    return Verdict("mismatch", call.rank, why + mismatch.said(other, names) + counts, mismatch.cure(call, other, calls))


def _unnoticed(reports: list[RankReport], names: dict[str, str]) -> Verdict | None:
    """No rank failed, and yet they did not call the same: they wait for ever, or what they computed is wrong."""
    calls = _calls(reports)
    parting = mismatch.first_parting(calls, tolerant=True)
    if parting:
        return _parted(parting, reports, names)
    rank, call = (all(r.done for r in reports) and mismatch.left_out(calls)) or (None, None)
    if call is None:
        return None
    why = f"Rank {rank} returned without a call that rank {call.rank} made: {mismatch.said(call, names)}"
    return Verdict("mismatch", rank, why + mismatch.tally(call, calls), mismatch.cure(call, None, calls))


def is_victim(report: RankReport) -> bool:
    """A rank that lost its peers, or waited for them in vain, is not where to look first."""
    return report.error is not None and _own_error(report.error) is None


def _chain(error: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    while error:
        yield error
        error = error["cause"]


def _own_error(error: dict[str, Any]) -> dict[str, Any] | None:
    """The error to blame this rank for, if any.

    An error of its own, followed by a lost connection while cleaning up, is its own; a lost connection that the
    learner's code turned into another error is still a victim's.
    """
    chain = list(_chain(error))
    if not any(map(_is_loss, chain)):
        return error
    after = chain[[_is_loss(each) for each in chain].index(True) :]
    return next((each for each in after if not _is_loss(each)), None)


def _lost(error: dict[str, Any]) -> dict[str, Any]:
    """The lost connection or timeout in a victim's errors."""
    return next(filter(_is_loss, _chain(error)))


def _is_loss(error: dict[str, Any]) -> bool:
    message = error["message"]
    if error["type"] not in TORCH_ERRORS or not (LOST_CONNECTION.search(message) or TIMED_OUT.search(message)):
        return False
    return collective(error["frames"]) != OWN_CODE or bool(FROM_A_BACKEND.search(message))


def _blame(report: RankReport, names: dict[str, str]) -> Verdict:
    if report.error is None:
        return _death(report, names)
    rank, error = report.rank, _own_error(report.error)
    at = place(error["frames"], names)
    if error["refusal"]:
        return Verdict("result", rank, *error["refusal"])
    if error["type"] == "SystemExit":
        why = f"Rank {rank} left with sys.exit({error['code']}){at} before its function returned"
        return Verdict("exit", rank, why, "return from the function instead of leaving the process")
    return Verdict("error", rank, f"Rank {rank} failed{at} with {_said(error)}", TRACE_CURE)


def _said(error: dict[str, Any]) -> str:
    return f"{error['type']}: {gist(error['message'])}" if error["message"].strip() else error["type"]


def _death(report: RankReport, names: dict[str, str]) -> Verdict:
    code = report.exit_code
    if code is None or code >= 0:
        why = f"Rank {report.rank} ended with exit code {code} and said nothing, as after os._exit({code})"
        return Verdict("death", report.rank, why, "return from the function instead of ending the process")
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    means, cure = SIGNAL_MEANS.get(name, ("sent from outside", "look at its last printed lines"))
    if name == "SIGABRT" and WRONG_SIZE.search(report.printed):
        means = "because the ranks brought tensors of different sizes to one collective"
        cure = "give every rank the same shape and dtype"
    at = place(stacks.in_fault_dump(report.printed), names)
    return Verdict("death", report.rank, f"Rank {report.rank} died of {name}{at}, {means}", cure)


def _hang(waiting: RankReport, reports: list[RankReport], timeout: float | None, names: dict[str, str]) -> Verdict:
    """The rank that waited is innocent: name the rank that never came."""
    frames = _lost(waiting.error)["frames"]
    waited = f"Rank {waiting.rank} waited {_seconds(waiting, timeout)} in {collective(frames)}{place(frames, names)}"
    others, counts, cure = _awaited(waiting, reports)
    absent = next((r for r in others if r.done), None)
    if absent:
        why = f"{waited} for rank {absent.rank}, which had already returned{counts}"
        return Verdict("hang", absent.rank, why, cure)
    apart = next((r for r in others if collective(_frames(r)) == OWN_CODE), None)
    if apart:
        why = f"{waited} for rank {apart.rank}, which was{place(_frames(apart), names) or ' elsewhere'}{counts}"
        slow = "let that rank reach the same call, or raise launch's timeout"
        return Verdict("hang", apart.rank, why, slow if cure == SAME_CALLS else cure)
    other = next((r for r in others if _frames(r)), None)
    if other:
        waited += f", while rank {other.rank} was in {collective(_frames(other))}{place(_frames(other), names)}{counts}"
    return Verdict("hang", waiting.rank, waited, cure)


def _awaited(waiting: RankReport, reports: list[RankReport]) -> tuple[list[RankReport], str, str]:
    """Return (the ranks that may have kept it waiting, what the counts of its call say, the cure)."""
    calls, call = _calls(reports), mismatch.unfinished(waiting.calls)
    others = [r for r in reports if r is not waiting]
    if call is None:
        return others, "", SAME_CALLS
    never_came = [r for r in others if r.rank in mismatch.missing(call, calls)]
    return never_came or others, mismatch.tally(call, calls), mismatch.cure(call, None, calls)


def _seconds(waiting: RankReport, timeout: float | None) -> str:
    """How long the rank waited: what its own error says, because a group can have a timeout of its own."""
    said = re.search(r"(\d+) ?(?:ms|milliseconds)", _lost(waiting.error)["message"])
    seconds = int(said.group(1)) / 1000 if said else timeout
    return f"{seconds:g} s" if seconds else "too long"


def _left_alone(victim: RankReport, reports: list[RankReport], names: dict[str, str]) -> Verdict:
    """Only lost connections: a rank went on to a collective that another rank, already done, never called."""
    frames = _lost(victim.error)["frames"]
    waited = f"Rank {victim.rank} lost its connection in {collective(frames)}{place(frames, names)}"
    others, counts, cure = _awaited(victim, reports)
    absent = next((r for r in others if r.done), None)
    if absent is None:
        return Verdict("error", victim.rank, waited, "see what each rank was doing, below")
    why = f"{waited}, because rank {absent.rank} had already returned without that call{counts}"
    return Verdict("mismatch", absent.rank, why, cure)


def _frames(report: RankReport) -> list[Frame]:
    return report.error["frames"] if report.error else report.where or []


def details(reports: list[RankReport], names: dict[str, str]) -> list[str]:
    """What each rank did, line by line."""
    return [line for report in reports for line in _detail(report, names)]


def _detail(report: RankReport, names: dict[str, str]) -> list[str]:
    """Lines on one rank for whoever wants to know more."""
    if report.error:
        head = f"{_consequence(report)}" if is_victim(report) else _said(report.error)
        return [f"Rank {report.rank}: {head}", *_error_lines(report.error, names)]
    if report.done:
        return [f"Rank {report.rank}: finished"]
    if not report.stopped:
        last = stacks.without_fault_dump(report.printed).strip().splitlines()[-8:]
        return [f"Rank {report.rank}: exit code {report.exit_code}", *(f"    {gist(line)}" for line in last)]
    if report.where == []:
        return [f"Rank {report.rank}: ended by the lab, before it reached your function"]
    frames = stacks.lines(report.where, names) if report.where else []
    return [f"Rank {report.rank}: ended by the lab{', when it was here' if frames else ''}", *frames]


def _consequence(report: RankReport) -> str:
    lost = _lost(report.error)
    where = f" in {collective(lost['frames'])}"
    if LOST_CONNECTION.search(lost["message"]):
        return f"as a consequence, it lost its connection{where}"
    return f"waited {_seconds(report, None)} for another rank{where}"


def _error_lines(error: dict[str, Any], names: dict[str, str]) -> list[str]:
    """The learner's stack, what was noted, and the errors that came before."""
    notes = [f"    {gist(note)}" for note in error["notes"]]
    earlier = [f"    after {_said(each)}{place(each['frames'], names)}" for each in list(_chain(error))[1:]]
    return [*stacks.lines(error["frames"], names), *notes, *earlier]
