"""The live view of a launch in a terminal, on stderr: a line for the whole run, and a line for each rank.

Drawn by rich, without its thread: the launcher's ticks redraw. stdout stays as it is, so that it can be piped.
"""

import sys
import time
from collections.abc import Iterator
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ddp_lab.charts import amount, count, facts, short, style
from ddp_lab.progress import Progress

REDRAW_SECONDS = 0.2
PLAIN_SECONDS = 10.0  # between two lines on a terminal that can't redraw
BAR = 2  # the column that takes the room that the others leave
STATE_STYLES = {"finished": "green", "failed": "bold red", "stopped": "yellow"}


class TerminalDisplay:
    """Show a launch while it runs: call it with each Event, `tick()` now and then, `close(run)` at the end."""

    def __init__(self, world_size: int, console: Console | None = None):
        self.console = console or Console(stderr=True, highlight=False, force_jupyter=False)
        self.redraws = self.console.is_terminal and not self.console.is_dumb_terminal
        self.unicode = self.console.encoding.lower().startswith("utf")
        self.overflow = "ellipsis" if self.unicode else "crop"
        self.progress = Progress(world_size)
        self.started = time.monotonic()
        self.drawn: float | None = None
        self.live: Live | None = None
        self.tick()  # starting takes seconds

    def __call__(self, event: Any) -> None:
        self.progress.add(event)

    def tick(self) -> None:
        """Redraw, at most five times a second."""
        now = time.monotonic()
        if self.drawn is not None and now - self.drawn < (REDRAW_SECONDS if self.redraws else PLAIN_SECONDS):
            return
        self.drawn = now
        if not self.redraws:
            self.console.print(self._headline(self.progress.says()), soft_wrap=True)
            return
        if self.live is None:
            # What the caller pipes away must not end up here, so stdout is redirected only when it is this terminal.
            self.live = Live(console=self.console, auto_refresh=False, redirect_stdout=sys.stdout.isatty())
            self.live.start()
        self.live.update(self._view(self.progress.says()), refresh=True)

    def close(self, run: Any = None) -> None:
        """Leave the final state on the screen. `run` may have events that came after the last call."""
        for event in list(run.log)[self.progress.seen :] if run else ():
            self.progress.add(event)
        self.progress.end()
        view = self._view(run.outcome if run and run.outcome != "running" else "ended", ended=True)
        if self.live is None:
            self.console.print(view)
            return
        live, self.live = self.live, None
        try:
            live.update(view, refresh=True)
        finally:
            live.stop()  # gives back the cursor and the streams

    def _view(self, says: str, ended: bool = False) -> Group:
        return Group(self._headline(says), self._table(ended))

    def _headline(self, says: str) -> Text:
        """The whole run: ranks, state, time, and what is to be said of all ranks together."""
        seconds = time.monotonic() - self.started
        parts = [count(len(self.progress.ranks), "rank"), says, f"{seconds:.0f} s", *facts(self.progress).split(" · ")]
        return self._text(", ".join(part for part in parts if part), "bold")

    def _table(self, ended: bool) -> Table:
        """One line per rank. A narrow terminal leaves out the bar first, then the speed, then the fingerprint."""
        width = self.console.width
        shown = [True, True, width >= 64, True, width >= 48, width >= 32]
        table = Table.grid(padding=(0, 2 if width >= 64 else 1, 0, 0), expand=width >= 64)
        name = len(f"rank {max(self.progress.ranks, default=0)}")
        for column in (column for column, show in enumerate(shown) if show):
            ratio, least = 1 if column == BAR else None, name if column == 0 else None
            table.add_column(no_wrap=True, overflow=self.overflow, ratio=ratio, min_width=least)
        for cells in self._rows(ended):
            table.add_row(*(cell for cell, show in zip(cells, shown, strict=True) if show))
        return table

    def _rows(self, ended: bool) -> Iterator[list[Any]]:
        """Per rank: name, state or step, bar, latest value, speed, first digits of the fingerprint."""
        fingerprints, _ = self.progress.fingerprints()
        metric = self.progress.metric
        room = 34 if self.console.width >= 64 else max(8, self.console.width - 27)
        for rank in self.progress.ranks.values():
            rate = rank.rate(whole_run=ended)
            says = short(rank.says(time.time()).removeprefix("running, "), room)
            yield [
                self._text(f"rank {rank.rank}", style(rank.rank)[0]),
                self._text(says, STATE_STYLES.get(rank.state, "")),
                ProgressBar(total=1.0, completed=rank.fraction() or 0.0),
                self._text(f"{short(metric, 12)} {amount(rank.value)}" if metric else ""),
                self._text("" if rate is None else f"{amount(rate)} samples/s"),
                self._text(short(fingerprints.get(rank.rank, ""))[:4]),
            ]

    def _text(self, text: str, looks: str = "") -> Text:
        """Plain text, never rich's markup, in characters that the terminal can show."""
        if not self.unicode:
            text = text.replace("…", "...").encode("ascii", "replace").decode()
        return Text(text, style=looks, no_wrap=True, overflow=self.overflow)
