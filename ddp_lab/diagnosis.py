"""From what each rank left behind to one sentence: which rank, what, where, why, and the cure.

Pure: plain values in, a verdict out, no process and no clock. The first error to arrive is often a victim's: a rank
whose neighbour died reports a lost connection. So a rank is blamed for its own error or death first, and for a lost
connection or a timeout only when nothing else explains it.
"""

import re
import signal
from dataclasses import dataclass, field, replace
from typing import Any

Frame = tuple[str, int, str, str]  # file, line, function, source

LOST_CONNECTION = re.compile(
    r"connection closed by peer|connection reset by peer|broken pipe|connection refused|socket closed|"
    r"remote process exited|communicator was aborted|failed to recv",
    re.IGNORECASE,
)
TIMED_OUT = re.compile(r"timed out|timeout", re.IGNORECASE)
NOT_THE_LEARNERS = re.compile(r"[/\\](site-packages|dist-packages|lib[/\\]python3\.\d+)[/\\]|^<frozen ")
FAULT_DUMP = re.compile(r"^Fatal Python error: .*", re.MULTILINE | re.DOTALL)
FAULT_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)
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
    where: its Python stack, outermost frame first, if the lab asked.
    """

    rank: int
    exit_code: int | None = None
    ended: float = 0.0
    done: bool = False
    stopped: bool = False
    error: dict[str, Any] | None = None
    where: list[Frame] | None = None
    printed: str = ""


@dataclass(frozen=True)
class Verdict:
    """kind: "error", "exit", "death", "mismatch" or "hang"; rank: the rank to blame; why: one sentence."""

    kind: str
    rank: int
    why: str
    cure: str
    details: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.why}: {self.cure}."


class LaunchError(RuntimeError):
    """A launch that did not succeed. `run` holds what there is: the log, the output, the results of finished ranks."""

    run: Any = None


class RankError(LaunchError):
    """A rank failed, died, or waited in vain. Fields: `rank`, `kind`, `why`, `cure`, `details`, `run`."""

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
    """The learner pressed Stop. `run` holds what there is."""

    run: Any = None
    details: list[str] = []  # noqa: RUF012 (replaced, never changed)

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
    failed = sorted((r for r in reports if not r.done and not r.stopped), key=lambda r: r.ended)
    if not failed:
        return None
    names = cells or {}
    return replace(_verdict(failed, reports, timeout, names), details=details(reports, names))


def _verdict(
    failed: list[RankReport], reports: list[RankReport], timeout: float | None, names: dict[str, str]
) -> Verdict:
    own = [r for r in failed if not is_victim(r)]
    if own:
        return _blame(own[0], names)
    timed_out = [r for r in failed if TIMED_OUT.search(r.error["message"])]
    if timed_out:
        return _hang(min(timed_out, key=lambda r: r.rank), reports, timeout, names)
    return _left_alone(min(failed, key=lambda r: r.rank), reports, names)


def is_victim(report: RankReport) -> bool:
    """A rank that lost its peers, or waited for them in vain, is not where to look first."""
    if report.error is None or report.error["type"] == "SystemExit":
        return False
    message = report.error["message"]
    from_torch = report.error["type"] in ("RuntimeError", "DistBackendError", "DistNetworkError", "DistStoreError")
    return from_torch and bool(LOST_CONNECTION.search(message) or TIMED_OUT.search(message))


def _blame(report: RankReport, names: dict[str, str]) -> Verdict:
    rank, error = report.rank, report.error
    if error is None:
        return _death(report, names)
    place = _place(error["frames"], names)
    if not error["frames"] and ": " in error["message"]:  # the lab refused, and said why and what to do
        return Verdict("result", rank, *error["message"].rsplit(": ", 1))
    if error["type"] == "SystemExit":
        why = f"Rank {rank} left with sys.exit({error['code']}){place} before its function returned"
        return Verdict("exit", rank, why, "return from the function instead of leaving the process")
    message = error["message"].strip().splitlines()
    said = f"{error['type']}: {message[0]}" if message else error["type"]
    return Verdict("error", rank, f"Rank {rank} failed{place} with {said.rstrip('.')}", TRACE_CURE)


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
    place = _place(_last_frames(report.printed), names)
    return Verdict("death", report.rank, f"Rank {report.rank} died of {name}{place}, {means}", cure)


def without_fault_dump(printed: str) -> str:
    """What a rank printed, less the report that Python adds when compiled code crashes."""
    return FAULT_DUMP.sub("", printed)


def _last_frames(printed: str) -> list[Frame]:
    dump = FAULT_DUMP.search(printed)
    found = FAULT_FRAME.findall(dump.group()) if dump else []
    frames = [(file, int(line), function, "") for file, line, function in reversed(found)]
    ours = [place for place, frame in enumerate(frames) if frame[0].endswith("worker.py")]
    return frames[ours[-1] + 1 if ours else 0 :]


def _hang(waiting: RankReport, reports: list[RankReport], timeout: float | None, names: dict[str, str]) -> Verdict:
    """The rank that waited is innocent: name the rank that never came."""
    frames = waiting.error["frames"]
    waited = f"Rank {waiting.rank} waited {_seconds(waiting, timeout)} in {collective(frames)}{_place(frames, names)}"
    absent = next((r for r in reports if r.done), None)
    if absent:
        why = f"{waited} for rank {absent.rank}, which had already returned"
        return Verdict("hang", absent.rank, why, "let every rank make the same collective calls")
    others = [r for r in reports if r is not waiting]
    apart = next((r for r in others if collective(_frames(r)) == "its own code"), None)
    if apart:
        why = f"{waited} for rank {apart.rank}, which was{_place(_frames(apart), names) or ' elsewhere'}"
        return Verdict("hang", apart.rank, why, "let that rank reach the same call, or raise launch's timeout")
    other = next((r for r in others if _frames(r)), None)
    where = (
        f", while rank {other.rank} was in {collective(_frames(other))}{_place(_frames(other), names)}" if other else ""
    )
    return Verdict(
        "hang", waiting.rank, waited + where, "let every rank make the same calls in the same order", details
    )


def _seconds(waiting: RankReport, timeout: float | None) -> str:
    """How long the rank waited: what its own error says, because a group can have a timeout of its own."""
    said = re.search(r"(\d+) ?(?:ms|milliseconds)", waiting.error["message"])
    seconds = int(said.group(1)) / 1000 if said else timeout
    return f"{seconds:g} s" if seconds else "too long"


def _left_alone(victim: RankReport, reports: list[RankReport], names: dict[str, str]) -> Verdict:
    """Only lost connections: a rank went on to a collective that another rank, already done, never called."""
    frames = victim.error["frames"]
    waited = f"Rank {victim.rank} lost its connection in {collective(frames)}{_place(frames, names)}"
    absent = next((r for r in reports if r.done), None)
    if absent is None:
        return Verdict("error", victim.rank, waited, "see what each rank was doing, below")
    why = f"{waited}, because rank {absent.rank} had already returned without that call"
    return Verdict("mismatch", absent.rank, why, "let every rank make the same collective calls")


def _frames(report: RankReport) -> list[Frame]:
    return report.error["frames"] if report.error else report.where or []


def collective(frames: list[Frame]) -> str:
    """Name what a stack waits in: a collective, DDP's averaging in backward, or "its own code"."""
    place = _own_place(frames)
    for file, _, function, _ in frames[place + 1 :]:
        if re.search(r"torch[/\\]distributed[/\\]", file) and not function.startswith("_") and function != "wrapper":
            return function
        if re.search(r"torch[/\\](autograd[/\\]|_tensor\.py)", file):
            return "backward, where DDP averages gradients"
        if re.search(r"torch[/\\]nn[/\\]parallel[/\\]distributed\.py", file):
            return "DistributedDataParallel"
    return "its own code"


def _own_place(frames: list[Frame]) -> int:
    """The place of the innermost frame of the learner's code; -1 where there is none."""
    own = [place for place, frame in enumerate(frames) if not NOT_THE_LEARNERS.search(frame[0])]
    return own[-1] if own else -1


def _place(frames: list[Frame], names: dict[str, str]) -> str:
    place = _own_place(frames)
    if place < 0:
        return ""
    file, line, function, _ = frames[place]
    return f" at {_short(file, names)}, line {line}, in {function}"


def _short(file: str, names: dict[str, str]) -> str:
    """A file's name as a learner knows it: the notebook's cell, else no more than its last two parts."""
    return names.get(file) or "/".join(re.split(r"[/\\]", file)[-2:])


def details(reports: list[RankReport], names: dict[str, str]) -> list[str]:
    """What each rank did, line by line."""
    return [line for report in reports for line in _detail(report, names)]


def _detail(report: RankReport, names: dict[str, str]) -> list[str]:
    """Lines on one rank for whoever wants to know more."""
    if report.error and is_victim(report):
        frames = report.error["frames"]
        return [f"Rank {report.rank}: {_consequence(report)} in {collective(frames)}", *_trace_lines(frames, names)]
    if report.error:
        lines = _error_lines(report.error, names)
        return [f"Rank {report.rank}: {lines[0]}", *lines[1:]]
    if report.done:
        return [f"Rank {report.rank}: finished"]
    if not report.stopped:
        last = without_fault_dump(report.printed).strip().splitlines()[-8:]
        return [f"Rank {report.rank}: exit code {report.exit_code}", *(f"    {line}" for line in last)]
    frames = _trace_lines(report.where, names) if report.where else []
    return [f"Rank {report.rank}: ended by the lab{', when it was here' if frames else ''}", *frames]


def _consequence(report: RankReport) -> str:
    if LOST_CONNECTION.search(report.error["message"]):
        return "as a consequence, it lost its connection"
    return f"waited {_seconds(report, None)} for another rank"


def _error_lines(error: dict[str, Any], names: dict[str, str]) -> list[str]:
    cause = (
        [f"    caused by {line.lstrip()}" for line in _error_lines(error["cause"], names)[:1]] if error["cause"] else []
    )
    head = f"{error['type']}: {error['message']}" if error["message"] else error["type"]
    return [head, *_trace_lines(error["frames"], names), *cause]


def _trace_lines(frames: list[Frame], names: dict[str, str]) -> list[str]:
    """The stack down to the learner's innermost line, with the source; all of it where no line is the learner's."""
    shown = frames[: _own_place(frames) + 1] or frames
    return [
        text
        for file, line, function, source in shown
        for text in (f"  {_short(file, names)}, line {line}, in {function}", f"    {source}")
        if text.strip()
    ]
