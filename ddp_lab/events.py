"""What ranks report, and the log that everything else reads.

Rank code calls `log(loss=loss, step=step)`. Who receives it depends on how the rank was started: `ddp_lab.launch`
installs a sink that sends events to the notebook; under `torchrun`, or in a plain call, a line is printed instead.
"""

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

PRINT_EVERY_SECONDS = 1.0
PLAIN = (bool, int, float, str, type(None))  # what a log keeps as it is; of anything else it keeps the text
MAX_TEXT = 200


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that one rank reported.

    rank: which process; time: seconds since the epoch, read in that process;
    kind: "starting", "running", "metrics", "done", "error" or "stopped"; data: the values, by name.
    """

    rank: int
    time: float
    kind: str
    data: dict[str, Any] = field(default_factory=dict)


class EventLog:
    """Every event of a run, in the order in which the launcher received them."""

    def __init__(self, events: list[Event] | None = None):
        self.events: list[Event] = list(events or [])

    def __len__(self) -> int:
        return len(self.events)

    def __iter__(self) -> Iterator[Event]:
        return iter(self.events)

    def __repr__(self) -> str:
        return f"EventLog({len(self.events)} events of {len(self.ranks())} ranks)"

    def append(self, event: Event) -> None:
        self.events.append(event)

    def ranks(self) -> list[int]:
        """The ranks that reported anything, ascending."""
        return sorted({event.rank for event in self.events})

    def metrics(self) -> list[str]:
        """The names that were logged, sorted; `step` is the axis, not a metric."""
        return sorted({name for event in self.events if event.kind == "metrics" for name in event.data} - {"step"})

    def series(self, name: str, rank: int) -> tuple[list[float], list[Any]]:
        """Return (steps, values) of one metric of one rank.

        Where rank code logged no `step`, the value's place in the series is its step.
        """
        steps, values = [], []
        for event in self.events:
            if event.kind == "metrics" and event.rank == rank and name in event.data:
                steps.append(event.data.get("step", len(steps)))
                values.append(event.data[name])
        return steps, values

    def save(self, path: str | os.PathLike) -> None:
        """Write one JSON object a line; tensors and other objects were turned into plain values when logged."""
        Path(path).write_text("".join(json.dumps(asdict(event), default=str) + "\n" for event in self.events))

    @classmethod
    def load(cls, path: str | os.PathLike) -> "EventLog":
        """Read what `save` wrote. Raises ValueError that names the file and the line which is no event."""
        events = []
        for number, line in enumerate(Path(path).read_text().splitlines(), start=1):
            try:
                events.append(Event(**json.loads(line)))
            except (TypeError, ValueError) as error:
                raise ValueError(f"{path}, line {number} is not an event of a saved log: {error}") from error
        return cls(events)


def log(**metrics: Any) -> None:
    """Report values from rank code, for example `log(step=step, loss=loss)`.

    Values are numbers, strings or tensors of one element. A tensor on a GPU is copied, not read, so the training
    step does not wait for the device. Names with a meaning for the dashboard: `step`, `total_steps`, `loss`,
    `samples` (in this step), `fingerprint`.
    Raises TypeError for a tensor of several elements, before anything is recorded.
    """
    _sink("metrics", {name: detached(name, value) for name, value in metrics.items()})


def detached(name: str, value: Any) -> Any:
    """Return a value that later training steps can't change: a number, a string, or a copy that stays on its GPU."""
    if hasattr(value, "detach") and value.numel() != 1:
        raise TypeError(f"log({name}=…) takes one number; this tensor has shape {tuple(value.shape)}, log its mean()")
    if hasattr(value, "detach") and value.device.type != "cpu":
        return value.detach().clone()
    if hasattr(value, "item") and (hasattr(value, "detach") or getattr(value, "size", 0) == 1):
        return value.item()
    return value if isinstance(value, PLAIN) else repr(value)[:MAX_TEXT]


def plain(data: dict[str, Any]) -> dict[str, Any]:
    """Read the tensors that `detached` left on a GPU. This waits for the device: never call it in the training step."""
    return {name: _read(value) if hasattr(value, "detach") else value for name, value in data.items()}


def _read(tensor: Any) -> Any:
    try:
        return tensor.item()
    except Exception as error:  # a lost value must not stop the others
        return f"not readable ({type(error).__name__})"


def set_sink(sink: Callable[[str, dict[str, Any]], None]) -> None:
    """Send what this process logs to `sink(kind, data)`. The launcher's worker calls this; rank code need not."""
    global _sink
    _sink = sink


class _Printer:
    """Without a launcher: print at most one line a second, so that a fast loop is not slowed down."""

    def __init__(self) -> None:
        self.last = -math.inf

    def __call__(self, kind: str, data: dict[str, Any]) -> None:
        now = time.monotonic()
        if now - self.last < PRINT_EVERY_SECONDS or "total_steps" in data:  # which is for a progress bar
            return
        self.last = now
        shown = ", ".join(
            f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
            for name, value in plain(data).items()
        )
        print(f"[rank {os.environ.get('RANK', '0')}] {shown}", file=sys.stderr, flush=True)


_sink: Callable[[str, dict[str, Any]], None] = _Printer()
