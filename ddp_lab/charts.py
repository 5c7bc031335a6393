"""What charts are made of: points in bounded memory, round ticks, colours and dashes, and short texts.

The dashboard, the terminal display and the figures share this. Nothing here draws, so nothing heavy is imported.
"""

import hashlib
import math
from collections.abc import Iterable
from typing import Any

# Luminance between 0.12 and 0.30: 3:1 on white and on JupyterLab's dark #111111. The first four are Okabe and Ito's
# (https://jfly.uni-koeln.de/color/); the others keep their distance for each kind of colour blindness too.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#a578f0", "#b43c00", "#785a87", "#965a5a")
NEUTRAL = "#7d8590"  # of the mean
DASHES = ((), (8, 3), (2, 2), (9, 3, 2, 3), (4, 2), (14, 4), (9, 2, 2, 2, 2, 2), (1, 3))  # pixels drawn, left out, …
MEAN = "mean over ranks"
MAX_POINTS = 128  # of one rank: a chart is about 600 pixels wide
LARGEST = 1e30  # what is larger is as good as infinite: arithmetic for drawing would overflow


def style(rank: int) -> tuple[str, tuple[int, ...]]:
    """Return (colour, dash) of a rank's line: a pair of its own for each of 64 ranks."""
    return COLOURS[rank % 8], DASHES[(rank + rank // 8) % 8]


def fingerprint_colours(fingerprint: str) -> list[str]:
    """Return the three stripes of a fingerprint's swatch: one colour alone would be the same for one pair in eight."""
    return [COLOURS[byte % 8] for byte in hashlib.sha256(fingerprint.encode("utf-8", "replace")).digest()[:3]]


def amount(value: float | None) -> str:
    """Write a number in few characters: 12,345 or 0.4312 or 1.2e-07 or nan; a dash for None."""
    if value is None:
        return "-"
    size = abs(value)
    if 100 <= size < 1e7:
        return f"{value:,.0f}"
    return f"{value:.{4 if size < 1 else 2}f}" if size == 0 or 1e-3 <= size < 100 else f"{value:.3g}"


def short(text: Any, length: int = 60) -> str:
    """Return one printable line of at most `length` characters; terminals and JSON choke on the other characters."""
    line = " ".join("".join(c if c.isprintable() else " " for c in str(text)[: 9 * length]).split())
    return line if len(line) <= length else line[: length - 1].rstrip() + "…"


def count(number: int, noun: str) -> str:
    """Return for example "1 rank", "2 ranks"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def facts(progress: Any, whole_run: bool = False) -> str:
    """Return what is to be said of all ranks together, in one line. `progress`: a progress.Progress."""
    rate, (_, same) = progress.rate(whole_run), progress.fingerprints()
    parts = [f"mean {short(progress.metric, 30)} {amount(progress.mean())}"] if progress.metric else []
    return " · ".join([*parts, *([f"{amount(rate)} samples/s in all"] if rate else []), *([same] if same else [])])


class Curves:
    """One metric of every rank against the step, in at most MAX_POINTS buckets a rank.

    A bucket covers `width` steps, a power of two, the same for all ranks: [number of the bucket, sum of weight × value,
    sum of weights]. When a rank has too many, neighbours are merged, so a point costs the same however many came
    before. A value that is not finite leaves its bucket not finite: a gap in the line.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.width = 1
        self.buckets: dict[int, list[list[float]]] = {}

    def add(self, rank: int, place: float, value: float, weight: float = 1.0) -> None:
        """Add a value; the places of one rank must not decrease."""
        buckets = self.buckets.setdefault(rank, [])
        index = place // self.width
        if buckets and buckets[-1][0] >= index:
            buckets[-1][1] += value * weight
            buckets[-1][2] += weight
            return
        buckets.append([index, value * weight, weight])
        while len(self.buckets[rank]) > MAX_POINTS:
            self.width *= 2
            self.buckets = {rank: _halved(buckets) for rank, buckets in self.buckets.items()}

    def line(self, rank: int) -> list[tuple[float, float]]:
        """Return one rank's points: (middle of the bucket, mean value), the value nan or inf for a gap."""
        return [(self._middle(index), total / weight) for index, total, weight in self.buckets.get(rank, [])]

    def mean(self, weighted: bool) -> list[tuple[float, float]]:
        """Return the mean over the ranks, where all have a value, each with its weight or all with the same."""
        lines = [{index: (total, weight) for index, total, weight in line} for line in self.buckets.values()]
        points = []
        for index in lines[0] if lines else ():
            parts = [line[index] for line in lines if index in line]
            if len(parts) == len(lines):
                total = sum(part if weighted else part / weight for part, weight in parts)
                points.append((self._middle(index), total / sum(w if weighted else 1.0 for _, w in parts)))
        return points

    def _middle(self, index: float) -> float:
        return index * self.width + (self.width - 1) / 2

    def axis(self) -> str:
        return "step" if self.width == 1 else f"step (each point: the mean of {self.width:,})"


def _halved(buckets: list[list[float]]) -> list[list[float]]:
    merged: list[list[float]] = []
    for index, total, weight in buckets:
        if merged and merged[-1][0] == index // 2:
            merged[-1][1] += total
            merged[-1][2] += weight
        else:
            merged.append([index // 2, total, weight])
    return merged


def segments(line: Iterable[tuple[float, float]]) -> list[list[tuple[float, float]]]:
    """Cut a line where its value is not finite, or too large to draw."""
    parts: list[list[tuple[float, float]]] = [[]]
    for x, y in line:
        if abs(y) < LARGEST:  # not so for nan
            parts[-1].append((x, y))
        elif parts[-1]:
            parts.append([])
    return [part for part in parts if part]


def ticks(low: float, high: float, most: int = 6, whole: bool = False) -> list[float]:
    """Return at most `most` + 1 round numbers that enclose low and high, evenly spaced by 1, 2, 2.5 or 5 × 10ⁿ."""
    largest = max(abs(low), abs(high))
    if high - low <= max(1e-9 * largest, 1e-300):  # too near to each other for floats to count between them
        around = largest / 2 if largest > 1e-290 else 0.5
        low, high = low - around, high + around
    size = 10.0 ** math.floor(math.log10((high - low) / most))
    for step in (part * size for part in (1, 2, 2.5, 5, 10, 20)):
        first, last = math.floor(low / step), math.ceil(high / step)
        if last - first <= most and (not whole or step == round(step)):
            return [number * step for number in range(first, last + 1)]
    return [low, high]


def tick_text(tick: float, ticks: list[float]) -> str:
    """Write a tick with as many decimals as its neighbours need."""
    step = ticks[1] - ticks[0]
    if max(map(abs, ticks)) >= 1e6 or step < 1e-5:
        return f"{tick:.3g}"
    decimals = next((d for d in range(7) if abs(round(step, d) - step) < step / 100), 6)
    return f"{tick:,.{decimals}f}"
