"""Reading Python stacks: which line is the learner's, and which collective a rank waits in. Pure."""

import re
from itertools import groupby

Frame = tuple[str, int, str, str]  # file, line, function, source; a stack lists the outermost first

NOT_THE_LEARNERS = re.compile(
    r"[/\\](site-packages|dist-packages|lib[/\\]python3\.\d+)[/\\]|^<frozen |ddp_lab[/\\](phases|tracing|worker)\.py$"
)
FAULT_DUMP = re.compile(r"^Fatal Python error: .*", re.MULTILINE | re.DOTALL)
FAULT_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)
CPP_TRACE = re.compile(
    r"^(Exception raised from .* \(most recent call first\):|frame #\d+: .*|<omitting python frames>)\n+", re.M
)
COLOUR_CODE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
SHOWN_FRAMES = 12
SHOWN_CHARACTERS = 300
OWN_CODE = "its own code"


def collective(frames: list[Frame]) -> str:
    """Name what a stack waits in: a collective, DDP's averaging in backward, or OWN_CODE."""
    for file, _, function, _ in frames[_own_place(frames) + 1 :]:
        if re.search(r"torch[/\\]distributed[/\\]", file) and not function.startswith("_") and function != "wrapper":
            return function
        if re.search(r"torch[/\\](autograd[/\\]|_tensor\.py)", file):
            return "backward, where DDP averages gradients"
        if re.search(r"torch[/\\]nn[/\\]parallel[/\\]distributed\.py", file):
            return "DistributedDataParallel"
    return OWN_CODE


def place(frames: list[Frame], cells: dict[str, str]) -> str:
    """Return " at FILE, line N, in FUNCTION" for the learner's innermost line, or "" where there is none."""
    own = _own_place(frames)
    if own < 0:
        return ""
    file, line, function, _ = frames[own]
    return f" at {_short(file, cells)}, line {line}, in {function}"


def lines(frames: list[Frame], cells: dict[str, str]) -> list[str]:
    """Show the stack down to the learner's innermost line, with the source; all of it where no line is the learner's.

    Of a very deep one, as of endless recursion, the beginning and the end.
    """
    shown = [(frame, len(list(same))) for frame, same in groupby(frames[: _own_place(frames) + 1] or frames)]
    text = []
    for (file, line, function, source), times in shown:
        again = f" ({times} times)" if times > 1 else ""
        text.append(f"  {_short(file, cells)}, line {line}, in {function}{again}")
        if source.strip():
            text.append(f"    {source.strip()}")
    most = 2 * SHOWN_FRAMES
    return text if len(text) <= most else [*text[:SHOWN_FRAMES], "  …", *text[-SHOWN_FRAMES:]]


def gist(message: str) -> str:
    """Return what a message says in one line, without colour codes, and not endlessly long.

    A DataLoader worker's error says what happened in its last line, and PyTorch's list of wrong keys after a colon.
    """
    said = [line.strip() for line in COLOUR_CODE.sub("", message[: 1 << 16]).splitlines() if line.strip()] or [""]
    first = said[0].rstrip(".:")
    if first.startswith("Caught ") and len(said) > 1:
        first = f"{said[-1]} (in {first.partition(' in ')[2] or 'another process'})"
    elif said[0].endswith(":") and len(said) > 1:
        first = f"{first}: {said[1]}"
    if len(first) > SHOWN_CHARACTERS // 2:
        first = re.split(r"(?<=[a-z)]{3})[.!] (?=[A-Z])", first, maxsplit=1)[0]  # its first sentence
    return first if len(first) <= SHOWN_CHARACTERS else first[:SHOWN_CHARACTERS] + " …"


def without_fault_dump(printed: str) -> str:
    """What a rank printed, less the report that Python adds when compiled code crashes, and less stacks of C++."""
    return CPP_TRACE.sub("", FAULT_DUMP.sub("", printed))


def in_fault_dump(printed: str) -> list[Frame]:
    """The learner's stack in the report that Python adds when compiled code crashes."""
    dump = FAULT_DUMP.search(printed)
    found = FAULT_FRAME.findall(dump.group()) if dump else []
    frames = [(file, int(line), function, "") for file, line, function in reversed(found)]
    ours = [at for at, frame in enumerate(frames) if frame[0].endswith("worker.py")]
    return frames[ours[-1] + 1 if ours else 0 :]


def _own_place(frames: list[Frame]) -> int:
    """The place of the innermost frame of the learner's code; -1 where there is none."""
    own = [at for at, frame in enumerate(frames) if not NOT_THE_LEARNERS.search(frame[0])]
    return own[-1] if own else -1


def _short(file: str, cells: dict[str, str]) -> str:
    """A file's name as a learner knows it: the notebook's cell, else no more than its last two parts."""
    return cells.get(file) or "/".join(re.split(r"[/\\]", file)[-2:])
