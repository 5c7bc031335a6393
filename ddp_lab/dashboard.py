"""The live view of a launch in a notebook: one output, which a static picture replaces at the end.

An SVG inside `ipywidgets.HTML`: a redraw costs about a millisecond, where a matplotlib picture would cost thirty.
Everything works in light and in dark themes: text takes the theme's colour, lines have one that is visible on both.
"""

import base64
import math
import time
from html import escape
from typing import Any

import ipywidgets
from IPython.display import display

from ddp_lab.charts import (
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
    tick_text,
    ticks,
)
from ddp_lab.figures import draw_summary
from ddp_lab.progress import Progress, RankState

WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
REDRAW_SECONDS = 0.2
WIDTH, HEIGHT = 660, 196  # pixels of the plot itself, at most
STYLE = """<style>
.ddp{max-width:720px;color:var(--jp-content-font-color1,inherit);font:13px/1.4 var(--jp-ui-font-family,sans-serif);
 font-variant-numeric:tabular-nums;padding:2px 0}
.ddp *{box-sizing:border-box}
.ddp-row{display:flex;gap:2px 10px;align-items:baseline;flex-wrap:wrap}
.ddp-row>:last-child{margin-left:auto}
.ddp-soft{color:color-mix(in srgb,currentColor 80%,transparent);font-size:12px}
.ddp-bar{height:6px;border-radius:3px;background:#80808040;overflow:hidden;margin:6px 0}
.ddp-bar>div{height:100%;border-radius:3px;background:#7d8590}
.ddp-cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,var(--least)),1fr));gap:6px;margin:8px 0}
.ddp-card{background:#8080801a;border-radius:4px;padding:5px 7px;min-width:0;border-left:3px solid transparent}
.ddp-card.ddp-failed{border-left-color:#d55e00}
.ddp-says{overflow:hidden;text-overflow:ellipsis;white-space:nowrap}
.ddp svg{overflow:visible;display:block}
.ddp .ddp-key{display:inline-block;vertical-align:middle;margin-right:6px}
.ddp .ddp-swatch{display:inline-block;vertical-align:-1px;margin-right:4px}
.ddp-plot{margin:6px 12px 40px 48px;max-width:660px}
.ddp-plot text{fill:color-mix(in srgb,currentColor 80%,transparent);font-size:11px}
.ddp-plot line{stroke:currentColor;opacity:.15}
.ddp-plot polyline{fill:none;stroke-linejoin:round;stroke-linecap:round;vector-effect:non-scaling-stroke}
body[data-jp-theme-light="false"] .ddp :is(path,rect,polyline){filter:brightness(1.35)}
</style>"""


class Dashboard:
    """Show a launch while it runs: pass it to `launch` as `on_event`, or leave that to `launch`.

    Call it with each Event, `tick()` now and then, `close(run)` at the end.
    """

    def __init__(self, world_size: int, title: str = ""):
        self.title = title
        self.progress = Progress(world_size, curves=Curves())
        self.started = self.drawn = time.monotonic()
        # nbval compares this text as it was displayed first with the saved one: it can't say how the run ended.
        self.text = f"DDP Lab: {count(world_size, 'rank')}"
        self.widget = ipywidgets.HTML(self._html())
        view = {"version_major": 2, "version_minor": 0, "model_id": self.widget.model_id}
        self.output = display({WIDGET_VIEW: view, "text/plain": self.text}, raw=True, display_id=True)

    def __call__(self, event: Any) -> None:
        self.progress.add(event)

    def tick(self) -> None:
        """Redraw, at most five times a second."""
        if self.widget is not None and time.monotonic() - self.drawn >= REDRAW_SECONDS:
            self.drawn = time.monotonic()
            self.widget.value = self._html()

    def close(self, run: Any = None) -> None:
        """Leave a picture in place of the widget. `run` may have events that came after the last call."""
        if self.widget is None:
            return
        for event in list(run.log)[self.progress.seen :] if run else ():
            self.progress.add(event)
        try:
            data, metadata = self._picture(run)
        except Exception as error:  # the run's result, or its error, must not get lost over a picture
            data, metadata = {"text/plain": f"{self.text} (no picture: {short(repr(error))})"}, {}
        self.output.update(data, metadata=metadata, raw=True)
        self.widget.close()
        self.widget = None

    def _picture(self, run: Any) -> tuple[dict[str, str], dict[str, Any]]:
        outcome = run.outcome if run and run.outcome != "running" else "ended"
        seconds = run.seconds if run else time.monotonic() - self.started
        picture = draw_summary(self.progress, outcome, seconds, self.title)
        png = base64.b64encode(picture.png()).decode()
        return {"image/png": png, "text/plain": self.text}, {"image/png": picture.png_metadata()}

    def _html(self) -> str:
        chart = _chart(self.progress) if self.progress.metric else ""
        seconds = time.monotonic() - self.started
        return (
            f'<div class="ddp">{STYLE}{_head(self.progress, self.title, seconds)}{_cards(self.progress)}{chart}</div>'
        )


def _head(progress: Progress, title: str, seconds: float) -> str:
    """The whole run: its state, the time, a bar of the steps done, and what is to be said of all ranks together."""
    done = progress.fraction()
    bar = ""
    if done is not None or progress.metric is None:
        label = f'role="progressbar" aria-label="steps done" aria-valuenow="{100 * (done or 0):.0f}"'
        bar = f'<div class="ddp-bar" {label}><div style="width:{100 * (done or 0):.1f}%"></div></div>'
    name = escape(short(title or count(len(progress.ranks), "rank")))
    took = f"{seconds:.0f} s" if seconds < 120 else f"{seconds // 60:.0f} min {seconds % 60:02.0f} s"
    first = (
        f'<div class="ddp-row"><b>{name}</b><span>{progress.says()}</span><span class="ddp-soft">{took}</span></div>'
    )
    return f'{first}{bar}<div class="ddp-row ddp-soft">{escape(facts(progress))}&nbsp;</div>'


def _cards(progress: Progress) -> str:
    """One card per rank: two or three abreast where there are few, four where there are many."""
    fingerprints, _ = progress.fingerprints()
    ranks = len(progress.ranks)
    least = 168 if ranks > 4 else 230 if ranks == 3 else 300
    cards = [
        _card(rank, progress.metric, _swatch(fingerprints.get(n, "")), ranks) for n, rank in progress.ranks.items()
    ]
    return f'<div class="ddp-cards" style="--least:{least}px">{"".join(cards)}</div>'


def _card(rank: RankState, metric: str | None, swatch: str, ranks: int) -> str:
    """Key, name and fingerprint; the state in words; the latest value and the speed, unless there are many ranks."""
    says = escape(short(rank.says(time.time()), 300))
    shown = says.removeprefix("running, ") if ranks > 4 else says
    name = f"<b>{_key(*style(rank.rank))}rank {rank.rank}</b>"
    rows = [_row(name, swatch), f'<div class="ddp-says" title="{says}">{shown}</div>']
    if metric and ranks <= 8:
        rate = "" if rank.rate() is None else f"{amount(rank.rate())} {'/s' if ranks > 4 else 'samples/s'}"
        rows.append(_row(f"{escape(short(metric, 12))} {amount(rank.value)}", rate))
    return f'<div class="ddp-card{" ddp-failed" * (rank.state == "failed")}">{"".join(rows)}</div>'


def _row(left: str, right: str) -> str:
    return f'<div class="ddp-row"><span>{left}</span><span class="ddp-soft">{right}</span></div>'


def _key(colour: str, dash: tuple[int, ...], width: float = 2.5) -> str:
    line = f'<path d="M0 5H28" stroke="{colour}" stroke-width="{width}" stroke-dasharray="{_dashes(dash)}"/>'
    return f'<svg class="ddp-key" width="28" height="10" aria-hidden="true">{line}</svg>'


def _dashes(dash: tuple[int, ...]) -> str:
    return " ".join(map(str, dash)) or "none"


def _swatch(fingerprint: str) -> str:
    """The fingerprint's colours, and its first digits for those who can't tell these colours apart."""
    if not fingerprint:
        return ""
    stripes = "".join(
        f'<rect x="{7 * place}" width="7" height="12" fill="{colour}"/>'
        for place, colour in enumerate(fingerprint_colours(fingerprint))
    )
    digits = escape(short(fingerprint)[:4])
    return f'<svg class="ddp-swatch" width="21" height="12" aria-hidden="true">{stripes}</svg><code>{digits}</code>'


def _chart(progress: Progress) -> str:
    """The lines of all ranks and their mean, with axes. Only the lines stretch with the cell; text keeps its size."""
    lines = {rank: segments(progress.curves.line(rank)) for rank in sorted(progress.curves.buckets)}
    points = [point for line in lines.values() for part in line for point in part]
    x0, x1, ys = _ranges(progress, points)
    looks = {rank: (*style(rank), 1.4) for rank in lines}
    if len(lines) > 1:
        few = len(lines) <= 4  # few lines show on the mean, many would hide it
        mean = {"mean": segments(progress.curves.mean(progress.weighted()))}
        lines = mean | lines if few else lines | mean
        looks["mean"] = (NEUTRAL, (), 4 if few else 2.5)
    drawn = "".join(_polylines(line, *looks[name], x0, x1, ys) for name, line in lines.items())
    grid = "".join(_y_tick(y, ys) for y in ys) + _x_ticks(x0, x1)
    says = f"Line chart of {short(progress.metric, 30)} against the step. {facts(progress)}"
    return f"""{_legend(progress, len(lines) > 1)}<div class="ddp-plot">
<svg role="img" aria-label="{escape(says)}" width="100%" height="{HEIGHT}">{grid}
<text x="50%" y="100%" dy="34" text-anchor="middle">{progress.curves.axis()}</text>
<svg width="100%" height="100%" viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none">{drawn}</svg></svg></div>"""


def _legend(progress: Progress, mean: bool) -> str:
    how = ", weighted by samples" if progress.weighted() else ""
    key = f"<span>{_key(NEUTRAL, (), 4)}{MEAN}{how}</span>" if mean else "<span></span>"
    return f'<div class="ddp-row ddp-soft"><span>{escape(short(progress.metric, 30))}</span>{key}</div>'


def _ranges(progress: Progress, points: list[tuple[float, float]]) -> tuple[float, float, list[float]]:
    """Return the first and last step of the axis, and the ticks of the values.

    The axis doubles when it is full, until it reaches total_steps: an axis that moves at every redraw can't be read.
    """
    xs, values = [x for x, _ in points] or [0.0], [y for _, y in points] or [0.0, 1.0]
    first, last = min(xs), max(xs)
    first = 0.0 if 0 < first <= 1 else first
    total = max((rank.total or 0.0 for rank in progress.ranks.values()), default=0.0)
    end = first + 2.0 ** math.ceil(math.log2(max(1.0, last - first)))
    end = max(last, total) if total and (last >= total or total < end) else end
    low, high = min(values), max(values)
    return first, max(end, first + 1), ticks(0.0 if 0 <= low < high / 2 else low, high, 5)


def _y_tick(y: float, ys: list[float]) -> str:
    place = f"{100 - 100 * (y - ys[0]) / (ys[-1] - ys[0]):.1f}%"
    return (
        f'<line x1="0" x2="100%" y1="{place}" y2="{place}"/>'
        f'<text x="-6" y="{place}" dy="4" text-anchor="end">{tick_text(y, ys)}</text>'
    )


def _x_ticks(x0: float, x1: float) -> str:
    places = ticks(x0, x1, 6, whole=True)
    return "".join(
        f'<text x="{100 * (x - x0) / (x1 - x0):.1f}%" y="100%" dy="16" text-anchor="middle">{tick_text(x, places)}'
        "</text>"
        for x in places
        if x0 <= x <= x1
    )


def _polylines(line, colour: str, dash: tuple[int, ...], width: float, x0: float, x1: float, ys: list[float]) -> str:
    across, up = WIDTH / (x1 - x0), HEIGHT / (ys[-1] - ys[0])
    looks = f'stroke="{colour}" stroke-width="{width}" stroke-dasharray="{_dashes(dash)}"'
    drawn = ""
    for part in line:
        part = part * 2 if len(part) == 1 else part  # a single point shows as a dot
        points = " ".join(f"{(x - x0) * across:.1f},{(ys[-1] - y) * up:.1f}" for x, y in part)
        drawn += f'<polyline {looks} points="{points}"/>'
    return drawn
