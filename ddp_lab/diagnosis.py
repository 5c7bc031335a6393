"""From what each rank left behind to one sentence: which rank, what, where, why, and the cure.

Pure: plain values in, a verdict out, no process and no clock. The first error to arrive is often a victim's: a rank
whose neighbour died reports a lost connection. So a rank is blamed for its own error or death first, and for a lost
connection or a timeout only when nothing else explains it.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from ddp_lab import cures, mismatch, stacks
from ddp_lab.mismatch import SAME_CALLS
from ddp_lab.reports import (
    RankReport,
    details,
    failed_in_a_collective,
    frames_of,
    is_victim,
    loss_of,
    own_error,
    said,
    seconds,
    signal_name,
    timed_out,
)
from ddp_lab.stacks import OWN_CODE, collective, place

SIGNAL_MEANS = {
    "SIGKILL": (
        "sent from outside, most likely by the system because memory ran out",
        cures.LESS_MEMORY,
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
    if own and not (parting and failed_in_a_collective(own[0])):
        return _blame(own[0], names)
    in_thread = [r for r in reports if r.thread_error]
    if in_thread:
        return _blame_thread(in_thread[0], names)
    if parting:
        return _parted(parting, reports, names)
    in_vain = [r for r in failed if timed_out(r)]
    if in_vain:
        return _hang(min(in_vain, key=lambda r: r.rank), reports, timeout, names)
    return _left_alone(min(failed, key=lambda r: r.rank), reports, names)


def _calls(reports: list[RankReport]) -> mismatch.Calls:
    return {report.rank: report.calls for report in reports}


def _parted(parting: mismatch.Parting, reports: list[RankReport], names: dict[str, str]) -> Verdict:
    call, other, calls = parting.call, parting.other, _calls(reports)
    why = f"Rank {call.rank} called {mismatch.said(call, names)} where rank {other.rank} called "
    why += mismatch.said(other, names)
    cure = mismatch.cure(call, other, calls)
    if cure != mismatch.SAME_TENSORS:
        why += mismatch.tally(other, calls) or mismatch.tally(call, calls)
    return Verdict("mismatch", call.rank, why, cure)


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


def _blame(report: RankReport, names: dict[str, str]) -> Verdict:
    if report.error is None:
        return _death(report, names)
    rank, error = report.rank, own_error(report.error)
    at = place(error["frames"], names)
    if error["refusal"]:
        return Verdict("result", rank, *error["refusal"])
    if error["type"] == "SystemExit":
        why = f"Rank {rank} left with sys.exit({error['code']}){at} before its function returned"
        return Verdict("exit", rank, why, "return from the function instead of leaving the process")
    return Verdict("error", rank, f"Rank {rank} failed{at} with {said(error)}", _cure(error))


def _blame_thread(report: RankReport, names: dict[str, str]) -> Verdict:
    """Python lets a process go on without the thread, and so another rank may wait for what the thread should do."""
    error = report.thread_error
    why = f"A thread of rank {report.rank} failed{place(error['frames'], names)} with {said(error)}"
    return Verdict("error", report.rank, why, _cure(error))


def _cure(error: dict[str, Any]) -> str:
    return cures.of(f"{error['type']}: {error['message']}")


def _death(report: RankReport, names: dict[str, str]) -> Verdict:
    code = report.exit_code
    if code is None or code >= 0:
        why = f"Rank {report.rank} ended with exit code {code} and said nothing, as after os._exit({code})"
        return Verdict("death", report.rank, why, "return from the function instead of ending the process")
    name = signal_name(code)
    means, cure = SIGNAL_MEANS.get(name, ("sent from outside", "look at its last printed lines"))
    if name == "SIGABRT" and failed_in_a_collective(report):
        means = "because the ranks brought tensors of different sizes to one collective"
        cure = "give every rank the same shape and dtype"
    at = place(stacks.in_fault_dump(report.printed), names)
    return Verdict("death", report.rank, f"Rank {report.rank} died of {name}{at}, {means}", cure)


def _hang(waiting: RankReport, reports: list[RankReport], timeout: float | None, names: dict[str, str]) -> Verdict:
    """The rank that waited is innocent: name the rank that never came."""
    frames = loss_of(waiting.error)["frames"]
    inside = _inside(waiting, collective(frames))
    waited = f"Rank {waiting.rank} waited {seconds(waiting, timeout)} {inside}{place(frames, names)}"
    others, counts, cure = _awaited(waiting, reports)
    absent = [r.rank for r in others if r.done]
    if absent:
        why = f"{waited} for {_ranks(absent)}, which had already returned{counts}"
        return Verdict("hang", _odd(waiting, absent, reports), why, cure)
    apart = next((r for r in others if collective(frames_of(r)) == OWN_CODE), None)
    if apart:
        why = f"{waited} for rank {apart.rank}, which was{place(frames_of(apart), names) or ' elsewhere'}{counts}"
        slow = "let that rank reach the same call, or raise launch's timeout"
        return Verdict("hang", apart.rank, why, slow if cure == SAME_CALLS else cure)
    other = next((r for r in others if frames_of(r)), None)
    if other:
        elsewhere = " of another process group" if cure == mismatch.SAME_GROUPS else ""
        there = f"{collective(frames_of(other))}{elsewhere}{place(frames_of(other), names)}"
        waited += f", while rank {other.rank} was in {there}{counts}"
    return Verdict("hang", waiting.rank, waited, cure)


def _inside(waiting: RankReport, name: str) -> str:
    call = mismatch.unfinished(waiting.calls)
    phase = mismatch.phase(call) if call else ""
    return f"in rank0_phase({phase!r})" if phase else f"in {name}"


def _awaited(waiting: RankReport, reports: list[RankReport]) -> tuple[list[RankReport], str, str]:
    """Return (the ranks that may have kept it waiting, what the counts of its call say, the cure)."""
    calls, call = _calls(reports), mismatch.unfinished(waiting.calls)
    others = [r for r in reports if r is not waiting]
    if call is None:
        joining = collective(loss_of(waiting.error)["frames"]) == "init_process_group"
        return others, "", "let every rank call init_process_group" if joining else SAME_CALLS
    never_came = [r for r in others if r.rank in mismatch.missing(call, calls)]
    met = [theirs for r in never_came or others if (theirs := mismatch.unfinished(r.calls))]
    return never_came or others, mismatch.tally(call, calls), mismatch.cure_of_waiting(call, met, calls)


def _left_alone(victim: RankReport, reports: list[RankReport], names: dict[str, str]) -> Verdict:
    """Only lost connections: a rank went on to a collective that another rank, already done, never called."""
    frames = loss_of(victim.error)["frames"]
    waited = f"Rank {victim.rank} lost its connection in {collective(frames)}{place(frames, names)}"
    others, counts, cure = _awaited(victim, reports)
    absent = [r.rank for r in others if r.done]
    if not absent:
        return Verdict("error", victim.rank, waited, "see what each rank was doing, below")
    why = f"{waited}, because {_ranks(absent)} had already returned without that call{counts}"
    return Verdict("mismatch", _odd(victim, absent, reports), why, cure)


def _odd(waiting: RankReport, absent: list[int], reports: list[RankReport]) -> int:
    """Of ranks that left a call out, and others that made it, those are right that are more; of two, who made it."""
    return waiting.rank if len(absent) > len(reports) / 2 else absent[0]


def _ranks(numbers: list[int]) -> str:
    """Name ranks: "rank 1", "ranks 0 and 2"."""
    *others, last = map(str, numbers)
    return f"ranks {', '.join(others)} and {last}" if others else f"rank {last}"
