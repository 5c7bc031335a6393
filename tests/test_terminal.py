"""The same events in a terminal: one line per rank, whatever the terminal can do, and nothing broken afterwards."""

import io
import re
import sys
import time
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console
from test_progress import ANYTHING, NAMES, metrics

from ddp_lab import terminal
from ddp_lab.events import Event, EventLog
from ddp_lab.terminal import TerminalDisplay

HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"
CONTROL = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\r")


class Stream(io.TextIOWrapper):
    """A terminal in memory, of any encoding."""

    def __init__(self, encoding: str = "utf-8", tty: bool = True):
        super().__init__(io.BytesIO(), encoding=encoding, write_through=True)
        self.tty = tty

    def isatty(self) -> bool:
        return self.tty

    def text(self) -> str:
        return self.buffer.getvalue().decode(self.encoding)


def display(ranks: int = 2, width: int = 100, encoding: str = "utf-8", **environment) -> tuple[TerminalDisplay, Stream]:
    stream = Stream(encoding)
    variables = {"TERM": "xterm-256color", **environment}
    console = Console(file=stream, width=width, height=30, _environ=variables)
    return TerminalDisplay(ranks, console), stream


def steps(ranks: int, count: int) -> list[Event]:
    now = int(time.time())  # an old event would count as silence; whole, so that speeds are exact
    return [
        metrics(
            rank,
            now + step / 8,
            step=step,
            total_steps=2 * count,
            loss=rank + 0.5,
            samples=8,
            fingerprint="3fa2b",
        )
        for step in range(count)
        for rank in range(ranks)
    ]


def play(view: TerminalDisplay, events: list[Event], outcome: str = "finished") -> None:
    for event in events:
        view(event)
        view.drawn = -1.0 if view.redraws else view.drawn
        view.tick()
    view.close(SimpleNamespace(log=EventLog(events), outcome=outcome, seconds=3.2))


def final(stream: Stream) -> list[str]:
    """The last screen, line by line."""
    text = stream.text()
    return [line.rstrip() for line in CONTROL.sub("", text[text.rindex(" ranks, ") - 1 :]).splitlines()]


def test_starting_is_shown_at_once():
    view, stream = display()
    assert "2 ranks, starting 2 processes, this takes a few seconds, 0 s" in stream.text()
    view.close()


def test_one_line_per_rank_and_one_for_the_run_stay_on_the_screen():
    view, stream = display()
    play(view, [*steps(2, 10), Event(0, 1.0, "done"), Event(1, 1.0, "done")])
    head, first, second = final(stream)
    assert head.startswith("2 ranks, finished, 0 s, mean loss 1.00, 128 samples/s in all, same weights on all ranks")
    assert re.fullmatch(r"rank 0  finished  ━+  loss 0.5000  64.00 samples/s  3fa2", first)
    assert re.fullmatch(r"rank 1  finished  ━+  loss 1.50    64.00 samples/s  3fa2", second)
    assert "step 10 of 20" in stream.text()


def test_the_cursor_and_the_streams_come_back(monkeypatch):
    monkeypatch.setattr(sys, "stdout", Stream())
    before = sys.stdout, sys.stderr
    view, stream = display()
    assert stream.text().startswith(HIDE_CURSOR)
    play(view, steps(2, 3), "interrupted")
    assert stream.text().rindex(SHOW_CURSOR) > stream.text().rindex(HIDE_CURSOR)
    assert stream.text().endswith(f"\n{SHOW_CURSOR}")  # what is printed afterwards starts on a line of its own
    assert (sys.stdout, sys.stderr) == before
    assert "interrupted" in final(stream)[0] and "stopped, step 3 of 6" in final(stream)[1]


def test_the_cursor_comes_back_also_when_the_last_drawing_fails(monkeypatch):
    view, stream = display()
    monkeypatch.setattr(view.live, "update", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        view.close()
    assert stream.text().endswith(SHOW_CURSOR)


def test_stdout_that_is_piped_away_is_left_alone(monkeypatch):
    piped = Stream(tty=False)
    monkeypatch.setattr(sys, "stdout", piped)
    view, stream = display()
    print("result")
    view.close()
    assert piped.text() == "result\n"
    assert "result" not in stream.text()


def test_what_is_printed_meanwhile_stands_above_the_display(monkeypatch):
    monkeypatch.setattr(sys, "stdout", Stream())
    view, stream = display()
    print("hello")
    play(view, steps(2, 2))
    assert "hello" not in "".join(final(stream)) and "hello\n" in stream.text()


@pytest.mark.parametrize("width", [20, 30, 40, 50, 63, 64, 80])
def test_narrow_terminals_get_one_line_per_rank_too(width):
    view, stream = display(width=width)
    play(view, steps(2, 10), "interrupted")
    lines = final(stream)
    assert len(lines) == 3
    assert all(len(line) <= width for line in lines)
    assert [line.startswith("rank") for line in lines] == [False, True, True]


def test_forty_columns_hold_step_loss_and_fingerprint():
    view, stream = display(width=40)
    for event in steps(2, 10):
        view(event)
    view.drawn = -1.0
    view.tick()
    assert "rank 0 step 10 of 20 loss 0.5000 3fa2" in CONTROL.sub("", stream.text())
    view.close()


def test_without_unicode_only_ascii_is_written():
    view, stream = display(encoding="ascii")
    events = [*steps(2, 10), Event(1, 2.0, "error", {"type": "ValueError", "message": "64 × 784 " * 20})]
    play(view, events, "failed on rank 1")
    assert "rank 1  failed: ValueError: 64 ? 784" in final(stream)[2]
    assert "\\u" not in stream.text()


def test_a_terminal_that_cannot_redraw_gets_few_plain_lines():
    view, stream = display(TERM="dumb")
    play(view, [*steps(2, 200), Event(0, 1.0, "done"), Event(1, 1.0, "done")])
    assert "\x1b" not in stream.text() and "\r" not in stream.text()
    assert len(stream.text().splitlines()) == 4  # starting; the end of the run and of both ranks
    view.close()


def test_redrawn_at_most_five_times_a_second(monkeypatch):
    now = 100.0
    monkeypatch.setattr(terminal, "time", SimpleNamespace(monotonic=lambda: now, time=lambda: now))
    view, _ = display()
    drawn = []
    monkeypatch.setattr(view.live, "update", lambda *_, **__: drawn.append(now))
    for step in range(100):  # twenty ticks a second for five seconds
        now = 100.0 + step / 20
        view.tick()
    assert 20 <= len(drawn) <= 25
    monkeypatch.undo()
    view.close()


def test_markup_and_control_characters_of_a_message_are_plain_text():
    view, stream = display(width=200)
    message = "[red]no[/red] [/] \x1b[31m\x07"
    play(view, [Event(1, 0.0, "error", {"type": "E", "message": message})], "failed on rank 1")
    assert "failed: E: [red]no[/red] [/] [31m" in final(stream)[2]
    assert "\x07" not in stream.text()


@settings(deadline=None, max_examples=50, suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(st.integers(0, 2), st.dictionaries(NAMES, ANYTHING)), max_size=6))
def test_whatever_is_logged_is_shown(logged):
    view, stream = display()
    play(view, [metrics(rank, **data) for rank, data in logged])
    assert "rank 1" in final(stream)[2]
