"""Pictures of a run's log: matplotlib figures that show themselves in a notebook.

`matplotlib.figure.Figure` only, never pyplot: that keeps every figure alive and changes settings of the whole process.
"""

import io
import math
import warnings
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from PIL import Image

from ddp_lab.charts import (
    LARGEST,
    MEAN,
    NEUTRAL,
    Curves,
    amount,
    count,
    facts,
    fingerprint_colours,
    segments,
    short,
    style,
)
from ddp_lab.events import EventLog
from ddp_lab.progress import Progress, RankState

WIDTH = 7.2  # inches; 100 dots an inch on the screen
CHART, ROW, HEAD = 2.75, 0.22, 0.7  # heights in inches
INK, SOFT, GRID = "#1f2328", "#57606a", "#d8dee4"
SHARPNESS = 1.5  # dots drawn per dot shown
KEYS = 6  # of a legend, in a row
LEGEND = {"fontsize": 8, "frameon": False, "handlelength": 3.6, "labelcolor": INK}


class Picture(Figure):
    """A Figure that shows itself as the last line of a cell; a plain Figure does so only under pyplot."""

    def __init__(self, title: str, height: float):
        super().__init__(figsize=(WIDTH, height), dpi=100, facecolor="white")
        self.title = self.alt = title

    def __repr__(self) -> str:
        return f"<{self.title}>"

    __str__ = __repr__

    def _repr_png_(self) -> tuple[bytes, dict[str, Any]]:
        return self.png(), self.png_metadata()

    def png(self) -> bytes:
        """Return the picture as a PNG of 64 colours, a third of the size of one with all."""
        file = io.BytesIO()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a rank's message may have characters that the font lacks
            self.savefig(file, format="png", dpi=100 * SHARPNESS)
        small = io.BytesIO()
        Image.open(file).convert("RGB").quantize(64, dither=Image.Dither.NONE).save(small, "png", optimize=True)
        return small.getvalue()

    def png_metadata(self) -> dict[str, Any]:
        """What Jupyter wants to know of the PNG: the size to show it at, and the text for those who can't see it."""
        return {"width": round(100 * WIDTH), "height": round(100 * self.get_figheight()), "alt": self.alt}


def loss(log: EventLog) -> Picture:
    """Return a figure: the loss of every rank against the step, and its mean over the ranks.

    Without a `loss` in the log, the first number that was logged takes its place.
    """
    progress = Progress(events=log, curves=Curves())
    rows = math.ceil(len(progress.curves.buckets) / KEYS)
    name = short(progress.metric or "nothing logged", 30)
    figure = Picture(f"DDP Lab: {name}, {count(len(progress.ranks), 'rank')}", CHART - 0.1 + 0.18 * rows)
    axes = _chart(figure, progress)
    keys = [line for line in axes.get_lines() if line.get_label().startswith("rank ")]
    if keys:
        axes.add_artist(axes.legend(handles=keys, loc="lower left", bbox_to_anchor=(0, 0.98), ncols=KEYS, **LEGEND))
    else:
        axes.text(0.5, 0.5, "no number was logged", transform=axes.transAxes, ha="center", color=SOFT, fontsize=9)
    _name_mean(axes)
    return figure


def summary(log: EventLog, outcome: str = "finished", seconds: float | None = None) -> Picture:
    """Return the picture that the dashboard leaves: the chart, and per rank its state, speed and fingerprint."""
    return draw_summary(Progress(events=log, curves=Curves()), outcome, seconds)


def draw_summary(progress: Progress, outcome: str, seconds: float | None = None, title: str = "") -> Picture:
    """Return the picture of `summary` from events that were read already."""
    progress.end()
    ranks = list(progress.ranks.values())
    columns = 1 if len(ranks) <= 8 else 2
    rows = math.ceil(len(ranks) / columns)
    said = facts(progress, whole_run=True)
    head = HEAD if said else HEAD - 0.24
    figure = Picture(
        f"DDP Lab: {count(len(ranks), 'rank')}, {outcome}", head + rows * ROW + CHART * bool(progress.metric)
    )
    height = figure.get_figheight()
    write(figure, 0.1, height - 0.18, _title(ranks, outcome, seconds, title), fontsize=10.5, weight="bold")
    write(figure, 0.1, height - 0.42, said, color=SOFT)
    states = [f"rank {rank.rank} {short(rank.says())}" for rank in ranks]
    figure.alt = ". ".join(part for part in (figure.title, said, *states) if part)
    fingerprints, _ = progress.fingerprints()
    for place, rank in enumerate(ranks):
        left, top = place // rows * WIDTH / columns, height - head - place % rows * ROW
        _strip(figure, rank, progress.metric, fingerprints.get(rank.rank, ""), left, top, compact=columns > 1)
    if progress.metric:
        _name_mean(_chart(figure, progress))
    return figure


def _title(ranks: list[RankState], outcome: str, seconds: float | None, title: str) -> str:
    took = "" if seconds is None else f" {'in' if outcome == 'finished' else 'after'} {seconds:.1f} s"
    return f"{short(title) or count(len(ranks), 'rank')}, {outcome}{took}"


def _chart(figure: Picture, progress: Progress) -> Axes:
    """Draw at the bottom each rank's line, thin and in its own style, over their mean, thick and grey."""
    height = figure.get_figheight()
    axes = figure.add_axes((0.09, 0.48 / height, 0.89, (CHART - 0.65) / height), facecolor="white")
    curves = progress.curves
    if len(curves.buckets) > 1:
        over, wide = (1.9, 3.2) if len(curves.buckets) <= 4 else (2.1, 2.5)  # few lines show on it, many would hide it
        how = ", weighted by samples" if progress.weighted() else ""
        _plot(axes, curves.mean(progress.weighted()), color=NEUTRAL, linewidth=wide, label=MEAN + how, zorder=over)
    for rank in sorted(curves.buckets):
        colour, dash = style(rank)
        _plot(axes, curves.line(rank), color=colour, linestyle=_dashes(dash, 0.7), linewidth=1.2, label=f"rank {rank}")
    axes.set_xlabel(curves.axis(), fontsize=9, color=SOFT)
    axes.set_ylabel(short(progress.metric or "loss", 30), fontsize=9, color=SOFT, parse_math=False)
    axes.grid(color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.locator_params(axis="y", nbins=5)
    axes.tick_params(labelsize=8, length=0, labelcolor=SOFT)
    for side, spine in axes.spines.items():
        spine.set(visible=side in ("left", "bottom"), color=GRID)
    return axes


def _name_mean(axes: Axes) -> None:
    lines = [line for line in axes.get_lines() if line.get_label().startswith(MEAN)]
    if lines:
        axes.legend(handles=lines, loc="upper right", **LEGEND)


def _plot(axes: Axes, line: list[tuple[float, float]], **looks: Any) -> None:
    axes.plot([x for x, _ in line], [y if abs(y) < LARGEST else math.nan for _, y in line], **looks)
    alone = [part[0] for part in segments(line) if len(part) == 1]  # which a line does not show
    if alone:
        axes.plot(*zip(*alone, strict=True), ".", color=looks["color"], markersize=4)


def _dashes(dash: tuple[int, ...], scale: float) -> Any:
    return (0, tuple(scale * part for part in dash)) if dash else "solid"


def write(figure: Picture, x: float, y: float, text: str, **looks: Any) -> None:
    """Write at (x, y) inches. parse_math: a dollar sign in a rank's message is no formula."""
    looks = {"fontsize": 8.5, "color": INK, "va": "center_baseline", "parse_math": False, **looks}
    figure.text(x / WIDTH, y / figure.get_figheight(), text, **looks)


def _strip(figure: Picture, rank: RankState, metric, fingerprint: str, left: float, y: float, compact: bool) -> None:
    """Draw one rank's row: key, name, state, latest value, samples per second, swatch and first digits."""
    colour, dash = style(rank.rank)
    at = {"transform": figure.dpi_scale_trans}
    key = {"color": colour, "linestyle": _dashes(dash, 0.4), "linewidth": 2}
    figure.add_artist(Line2D([left + 0.1, left + 0.5], [y, y], **key, **at))
    write(figure, left + 0.58, y, f"rank {rank.rank}")
    write(figure, left + 1.2, y, short(rank.says(), 13 if compact else 44))
    right = left + (2.85 if compact else 6.3)
    if not compact and rank.value is not None:
        write(figure, right - 1.35, y, f"{short(metric, 12)} {amount(rank.value)}", ha="right")
    if rank.rate(True) is not None:
        write(figure, right - 0.15, y, f"{amount(rank.rate(True))} {'/s' if compact else 'samples/s'}", ha="right")
    if fingerprint:
        for stripe, colour in enumerate(fingerprint_colours(fingerprint)):
            figure.add_artist(Rectangle((right + 0.07 * stripe, y - 0.06), 0.07, 0.12, color=colour, linewidth=0, **at))
        write(figure, right + 0.28, y, short(fingerprint)[:4], family="monospace")
