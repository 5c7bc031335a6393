"""The space-time picture: who called what, who waited for whom, and where each rank stands at the end.

A row is a rank, a column is one call of a process group: the n-th call of one rank meets the n-th of every other. In
a cell the bar runs from the rank's arrival to the end of the call, on the column's own scale: a long bar has waited,
the shortest came last.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from matplotlib.patches import Rectangle

from ddp_lab.charts import NEUTRAL, count, short, style
from ddp_lab.figures import INK, SOFT, WIDTH, Picture, write
from ddp_lab.mismatch import first_parting
from ddp_lab.tracing import GRADIENTS, POINT_TO_POINT, WRAPPER, Collective

COLUMNS = 5
LEFT, RIGHT = 0.62, 1.75  # inches for the names of the ranks, and for where they stand
HEAD, ROW, WIDEST = 0.56, 0.66, 1.5
ODD = "#b43c00"
MOMENT = 0.001  # seconds: what took less is drawn as if all had come at once


@dataclass
class Column:
    """One call of a group, as each rank made it. title: what to call it."""

    title: str
    calls: dict[int, Collective] = field(default_factory=dict)

    @property
    def start(self) -> float:
        return min(call.start for call in self.calls.values())

    @property
    def ended(self) -> bool:
        return all(call.end is not None for call in self.calls.values())

    def stop(self, end: float) -> float:
        """When the last rank left it; `end`, the end of the run, where one never left."""
        return max(call.end or max(end, call.start) for call in self.calls.values())


def columns(trace: Iterable[Collective]) -> list[Column]:
    """Put together what met, in the order of time. Sends and receives meet one another by their order."""
    found: dict[tuple, Column] = {}
    passed: dict[tuple, int] = {}
    for call in sorted(trace, key=lambda call: call.start):
        alone = call.op in POINT_TO_POINT
        place = call.seq
        if alone:
            place = passed[call.rank, call.group] = passed.get((call.rank, call.group), 0) + 1
        title = f"{'send, recv' if alone else 'call'} {place}"
        key = (call.group, alone, place)
        column = found.setdefault(key, Column(title if call.group == "0" else f"{title}, group {call.group}"))
        column.calls[call.rank] = call
    return list(found.values())


def picture(trace: list[Collective], ends: list[str], last: int = COLUMNS) -> Picture:
    """Return a figure of the `last` calls. ends: where each rank stands, in words, one per rank."""
    shown = columns(trace)[-last:]
    ranks = len(ends)
    figure = Picture(
        f"DDP Lab: where {count(ranks, 'rank')} stand{'s' if ranks == 1 else ''}", HEAD + ROW * ranks + 0.3
    )
    figure.alt = f"{figure.title}. " + ". ".join(f"rank {rank} {end}" for rank, end in enumerate(ends))
    width = min(WIDEST, (WIDTH - LEFT - RIGHT) / max(len(shown), 1))
    right = LEFT + max(len(shown), 1) * width + 0.12
    height = figure.get_figheight()
    for number, column in enumerate(shown):
        _draw_column(figure, column, LEFT + number * width, width, trace, ranks)
    for rank, end in enumerate(ends):
        y = height - HEAD - ROW * (rank + 0.5)
        write(figure, 0.1, y, f"rank {rank}", color=style(rank)[0], weight="bold")
        for place, line in enumerate(_wrapped(end)):
            write(figure, right, y + 0.16 - 0.15 * place, line, fontsize=7.5)
    key = "bar: from a rank's arrival to the end of the call · hatched: it never ended · red: unlike the others"
    write(figure, 0.1, 0.14, key if shown else "no collective was called", color=SOFT, fontsize=7.5)
    write(figure, right, height - 0.2, "at the end", color=SOFT, fontsize=8)
    return figure


def _draw_column(figure: Picture, column: Column, x: float, width: float, trace: list[Collective], ranks: int) -> None:
    height = figure.get_figheight()
    end = max(call.end or call.start for call in trace)
    took = column.stop(end) - column.start
    parting = first_parting({rank: [call] for rank, call in column.calls.items()})
    write(figure, x + 0.06, height - 0.2, short(column.title, 22), color=SOFT, fontsize=8)
    write(figure, x + 0.06, height - 0.4, _length(took) if column.ended else "never ended", color=SOFT, fontsize=7.5)
    for rank in range(ranks):
        top = height - HEAD - ROW * rank
        call = column.calls.get(rank)
        odd = parting is not None and parting.call.rank == rank
        _draw_cell(figure, (x, top - ROW + 0.06, width - 0.08, ROW - 0.1), call, odd)
        if call:
            begin = (call.start - column.start) / took if took > MOMENT else 0.0
            stop = ((call.end or column.stop(end)) - column.start) / took if took > MOMENT else 1.0
            _draw_bar(figure, x + 0.06, top - ROW + 0.11, width - 0.2, (begin, stop), rank, call.end is None)


def _draw_cell(figure: Picture, box: tuple[float, float, float, float], call: Collective | None, odd: bool) -> None:
    x, y, width, height = box
    looks = {"edgecolor": ODD if odd else NEUTRAL, "linewidth": 2.0 if odd else 0.8, "facecolor": "none"}
    dotted = {"linestyle": (0, (1, 2))} if call is None else {}
    figure.add_artist(Rectangle((x, y), width, height, transform=figure.dpi_scale_trans, **looks, **dotted))
    if call is None:
        write(figure, x + 0.06, y + height / 2, "not called", color=SOFT, fontsize=7)
        return
    fits = int(width / 0.055)
    for place, text in enumerate(_words(call)):
        write(
            figure, x + 0.06, y + height - 0.1 - 0.13 * place, short(text, fits), fontsize=7, color=ODD if odd else INK
        )


def _words(call: Collective) -> list[str]:
    name = {GRADIENTS: "backward", WRAPPER: f"DDP {call.op}"}.get(call.within, call.name)
    shape = "×".join(map(str, call.shape))
    return [name, f"{shape or 'scalar'} {call.dtype}" if call.dtype else "", f"line {call.line}" if call.line else ""]


def _draw_bar(figure, x: float, y: float, width: float, part: tuple[float, float], rank: int, waits: bool) -> None:
    begin, stop = part
    colour = style(rank)[0]
    looks = {"facecolor": "none", "hatch": "//////", "edgecolor": colour} if waits else {"color": colour}
    size = max(width * (stop - begin), 0.025)
    left = min(x + width * begin, x + width - size)
    figure.add_artist(Rectangle((left, y), size, 0.07, linewidth=0.6, transform=figure.dpi_scale_trans, **looks))


def _length(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 0.1 else f"{1000 * seconds:.1f} ms"


def _wrapped(text: str, length: int = 30, lines: int = 3) -> list[str]:
    """Break a text into at most three lines, at blanks."""
    found = [""]
    for word in text.split():
        if len(found[-1]) + len(word) >= length and found[-1]:
            found.append("")
        found[-1] = f"{found[-1]} {word}".strip()
    return [short(line, length) for line in found[:lines]]
