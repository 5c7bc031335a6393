"""What each rank is doing, read from its events one by one, in bounded memory.

The dashboard, the terminal display and the figures all show this. Nothing here draws, so nothing heavy is imported.
Rank code may log anything under any name: what can't be understood is left out, and nothing raises.
"""

import math
import numbers
import signal
from collections import deque
from collections.abc import Iterable
from typing import Any

MAX_FINGERPRINTS = 256
MAX_STEP = 1e15  # beyond it floats no longer count in ones
RATE_SECONDS = 3.0
RECENT = 10  # values of a rank that the headline averages
SILENT_SECONDS = 5.0
NOT_PLOTTED = frozenset({"step", "total_steps", "samples", "epoch", "fingerprint"})
STATES = {"starting": "starting", "running": "running", "done": "finished", "error": "failed", "stopped": "stopped"}
SAME, DIFFERENT = "same weights on all ranks", "weights differ between ranks"
ENDED = ("finished", "failed", "stopped")


def number(value: Any) -> float | None:
    """Return a logged value as a float, which may be nan or inf; None when it is no number."""
    if type(value) is float:  # quick, because it is nearly always one
        return value
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def finite(value: Any) -> float | None:
    """Return a logged value as a float; None when it is no finite number."""
    value = number(value)
    return value if value is not None and math.isfinite(value) else None


class RankState:
    """What one rank is doing, as far as its events tell."""

    def __init__(self, rank: int):
        self.rank = rank
        self.state, self.why = "starting", ""  # why it failed
        self.seen = self.counted = 0.0  # seconds since the epoch: its latest event, its latest samples
        self.step = self.first_step = self.total = self.epoch = self.value = None
        self.place = self.offset = 0.0  # on the axis of steps
        self.values, self.samples = 0, 0.0
        self.marks: deque[tuple[float, float]] = deque(maxlen=64)  # (time, samples until then)
        self.first_mark: tuple[float, float] | None = None
        self.recent: deque[tuple[float, float]] = deque(maxlen=RECENT)
        self.prints, self.fingerprints = 0, {}  # how many, and the latest of them

    def change(self, kind: str, data: dict[str, Any]) -> None:
        """Take in a change of state. What ended stays as it ended."""
        if self.state not in ENDED and kind in STATES:
            self.state = STATES[kind]
            self.why = _reason(data) if self.state == "failed" else ""

    def see(self, data: dict[str, Any], when: float) -> None:
        """Take in a metrics event, all but the plotted value."""
        self.state = "running" if self.state == "starting" else self.state
        self._move(finite(data.get("step")))
        if 0 < (total := finite(data.get("total_steps")) or 0.0) <= MAX_STEP:
            self.total = total
        self.epoch = finite(data.get("epoch", self.epoch))
        self._count(finite(data.get("samples")) or 0.0, when)
        if isinstance(data.get("fingerprint"), str):
            self._keep(data["fingerprint"])

    def _keep(self, fingerprint: str) -> None:
        """Remember it by step, so that replicas are compared at one step."""
        self.prints += 1
        at_step = self.place if self.epoch is None else (self.epoch, self.step)
        key = at_step if self.step is not None else ("print", self.prints)
        self.fingerprints.pop(key, None)
        self.fingerprints[key] = fingerprint
        if len(self.fingerprints) > MAX_FINGERPRINTS:
            del self.fingerprints[next(iter(self.fingerprints))]

    def plot(self, value: float, samples: float) -> None:
        """Take in the plotted value. Without steps, its place in the series is its step."""
        self.value, self.values = value, self.values + 1
        self.recent.append((value, samples if samples > 0 else 1.0))
        self.place = self.place if self.step is not None else self.values - 1.0

    def _move(self, step: float | None) -> None:
        """Follow the step. Where it starts again, as in a loop that counts within an epoch, the axis goes on."""
        if step is None or abs(step) > MAX_STEP:
            return
        if self.step is not None and step < self.step:
            self.offset = self.place + 1 - step
        self.first_step = step if self.first_step is None else self.first_step
        self.step, self.place = step, step + self.offset

    def _count(self, samples: float, when: float) -> None:
        if samples <= 0:
            return
        self.samples += samples
        self.counted = when
        self.first_mark = self.first_mark or (when, self.samples)  # how long what came before took is unknown
        if not self.marks or when - self.marks[-1][0] >= RATE_SECONDS / 50:
            self.marks.append((when, self.samples))
        while len(self.marks) > 2 and when - self.marks[0][0] > RATE_SECONDS:
            self.marks.popleft()

    def rate(self, whole_run: bool = False) -> float | None:
        """Samples per second by the rank's own clock, of the latest seconds or of the whole run."""
        if self.first_mark is None:
            return None
        when, samples = self.first_mark if whole_run else self.marks[0]
        return (self.samples - samples) / (self.counted - when) if self.counted > when else None

    def steps_done(self) -> float | None:
        """A loop whose first step is 0 has done one step more than it says."""
        return self.step + 1 if self.step is not None and self.first_step == 0 else self.step

    def fraction(self) -> float | None:
        """What part of its steps it has done; None when it logged no total_steps."""
        if self.state == "finished":
            return 1.0
        return None if not self.total or self.step is None else min(1.0, max(0.0, self.steps_done() / self.total))

    def says(self, now: float = 0.0) -> str:
        """Its state in words: "running, step 12 of 40", "silent for 9 s, step 12 of 40", "failed: ValueError: no"."""
        if self.state == "failed":
            return f"failed: {self.why}"
        state, steps = self.state, ""
        if state == "running" and self.seen and now - self.seen > SILENT_SECONDS:
            state = f"silent for {now - self.seen:.0f} s"  # a slow step, or a rank that waits for another
        if self.step is not None and state != "finished":
            steps = f", step {self.steps_done():,.0f}" + (f" of {self.total:,.0f}" if self.total else "")
        return state + steps


def _reason(data: dict[str, Any]) -> str:
    if "type" in data:
        return f"{data['type']}: {data.get('message', '')}".rstrip(": ")
    code = data.get("exit_code")
    try:
        return f"died of {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    except (TypeError, ValueError):
        return f"exit code {code}"


class Progress:
    """All ranks of a run, and which of their metrics is the one to plot: the loss or, without one, the first number.

    curves: an optional `charts.Curves`, which gets every value to plot.
    """

    def __init__(self, world_size: int = 0, events: Iterable[Any] = (), curves: Any = None):
        self.ranks = {rank: RankState(rank) for rank in range(world_size)}
        self.metric: str | None = None
        self.curves = curves
        self.seen = 0  # events so far
        for event in events:
            self.add(event)

    def add(self, event: Any) -> None:
        """Take in an Event."""
        self.seen += 1
        rank = self.ranks.get(event.rank) or self.ranks.setdefault(event.rank, RankState(event.rank))
        rank.seen = event.time
        if event.kind != "metrics":
            rank.change(event.kind, event.data)
            return
        rank.see(event.data, event.time)
        value = self._value(event.data)
        if value is not None:
            rank.plot(value, finite(event.data.get("samples")) or 0.0)
            if self.curves is not None:
                self.curves.add(rank.rank, rank.place, value, rank.recent[-1][1])

    def _value(self, data: dict[str, Any]) -> float | None:
        if self.metric != "loss":
            names = ["loss"] if number(data.get("loss")) is not None else [] if self.metric else data
            new = next((name for name in names if name not in NOT_PLOTTED and number(data[name]) is not None), None)
            if new is not None:
                self.metric = new
                for rank in self.ranks.values():
                    rank.value, rank.values = None, 0
                    rank.recent.clear()
                if self.curves is not None:
                    self.curves.clear()
        return None if self.metric is None else number(data.get(self.metric))

    def end(self) -> None:
        """The run has ended, so has every rank."""
        for rank in self.ranks.values():
            rank.change("stopped", {})

    def plotted(self) -> list[RankState]:
        return [rank for rank in self.ranks.values() if rank.values]

    def weighted(self) -> bool:
        """Whether means over ranks are weighted by samples: only where every rank says how many it had."""
        return all(rank.samples for rank in self.plotted())

    def mean(self) -> float | None:
        """The mean of the ranks' latest values, at most RECENT a rank: the headline.

        One step alone says little: the last step of an epoch often has few samples.
        """
        weighted = self.weighted()
        parts = [(value, weight if weighted else 1.0) for rank in self.plotted() for value, weight in rank.recent]
        return sum(value * weight for value, weight in parts) / sum(weight for _, weight in parts) if parts else None

    def fraction(self) -> float | None:
        """What part of all steps is done; None while no rank says how many there are."""
        parts = [rank.fraction() for rank in self.ranks.values()]
        known = [part for part in parts if part is not None]
        return sum(known) / len(parts) if known else None

    def rate(self, whole_run: bool = False) -> float | None:
        """Samples per second of all ranks together."""
        rates = [rank.rate(whole_run) for rank in self.ranks.values()]
        return sum(rate or 0.0 for rate in rates) if any(rate is not None for rate in rates) else None

    def fingerprints(self) -> tuple[dict[int, str], str]:
        """Return ({rank: fingerprint}, verdict), at the latest step that all ranks have reported.

        At each rank's own latest step, replicas in full agreement would seem to differ while one is a step ahead.
        """
        logged = [rank for rank in self.ranks.values() if rank.fingerprints]
        first = logged[0].fingerprints if logged else {}
        common = next((key for key in reversed(first) if all(key in rank.fingerprints for rank in logged)), None)
        if common is None:
            return {rank.rank: next(reversed(rank.fingerprints.values())) for rank in logged}, ""
        shown = {rank.rank: rank.fingerprints[common] for rank in logged}
        if len(shown) < len(self.ranks) or len(shown) == 1:
            return shown, ""
        return shown, SAME if len(set(shown.values())) == 1 else DIFFERENT

    def says(self) -> str:
        """The state of the whole run in words."""
        states = [rank.state for rank in self.ranks.values()]
        if all(state == "starting" for state in states):
            return f"starting {len(states)} process{'es' * (len(states) != 1)}, this takes a few seconds"
        if "failed" in states:
            return f"rank {next(rank.rank for rank in self.ranks.values() if rank.state == 'failed')} failed"
        running = [rank for rank in self.ranks.values() if rank.state == "running" and rank.step is not None]
        if running:
            return min(running, key=lambda rank: rank.steps_done()).says()
        return next(state for state in ("running", "stopped", "finished", "starting") if state in states)
