"""One output, live and bounded while ranks run, a picture at the end, whatever they log and however they end."""

import math
import re
import time
import warnings
from html.parser import HTMLParser
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jupyter_client.manager import start_new_kernel
from test_charts import JUPYTER_DARK, WHITE, contrast
from test_progress import ANYTHING, NAMES, metrics

from ddp_lab import dashboard
from ddp_lab.charts import MAX_POINTS
from ddp_lab.dashboard import WIDGET_VIEW, Dashboard
from ddp_lab.events import Event, EventLog


class Output:
    """Stands for what IPython's display returns, and remembers everything shown."""

    def __init__(self):
        self.shown, self.updates = [], []

    def display(self, data, raw, display_id):
        assert raw and display_id
        self.shown.append(data)
        return self

    def update(self, data, metadata, raw):
        assert raw
        self.updates.append((data, metadata))


@pytest.fixture
def output(monkeypatch):
    output = Output()
    monkeypatch.setattr(dashboard, "display", output.display)
    return output


class Page(HTMLParser):
    """The elements and the visible text of the widget."""

    def __init__(self, html: str):
        super().__init__()
        self.elements, self.text = [], ""
        self.feed(html.replace(dashboard.STYLE, ""))

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.text += f"{data} " if data.strip() else ""

    def all(self, tag: str) -> list[dict]:
        return [attributes for name, attributes in self.elements if name == tag]


def seen(view: Dashboard) -> Page:
    return Page(view._html())


def steps(ranks: int, count: int, **more) -> list[Event]:
    now = int(time.time())  # an old event would count as silence; whole, so that speeds are exact
    return [
        metrics(
            rank,
            now + step / 128,
            step=step,
            total_steps=2 * count,
            loss=rank + 1 / (step + 1),
            samples=8,
            **more,
        )
        for step in range(count)
        for rank in range(ranks)
    ]


def shown(ranks: int, events: list[Event]) -> Dashboard:
    view = Dashboard(ranks)
    for event in events:
        view(event)
    return view


def ended(events: list[Event], outcome: str) -> SimpleNamespace:
    return SimpleNamespace(log=EventLog(events), outcome=outcome, seconds=3.21)


def test_one_output_whose_text_never_changes_and_a_widget_that_is_gone_at_the_end(output):
    events = steps(2, 20)
    view = shown(2, events)
    widget = view.widget
    view.close(ended(events, "finished"))
    view.close(ended(events, "finished"))  # once more does nothing
    assert [list(data) for data in output.shown] == [[WIDGET_VIEW, "text/plain"]]
    assert len(output.updates) == 1
    data, metadata = output.updates[0]
    assert list(data) == ["image/png", "text/plain"]
    assert data["text/plain"] == output.shown[0]["text/plain"] == "DDP Lab: 2 ranks"
    assert "finished" in metadata["image/png"]["alt"]
    assert widget.comm is None and view.widget is None
    view.tick()  # late ticks do no harm


def test_starting_is_shown_at_once(output):
    page = Page(Dashboard(2).widget.value)
    assert "starting 2 processes, this takes a few seconds" in page.text
    assert page.text.count("rank 0") == page.text.count("rank 1") == 1


def test_a_running_launch_shows_states_speed_loss_fingerprints_and_progress(output):
    text = seen(shown(2, steps(2, 20, fingerprint="3fa2b"))).text
    assert text.count("running, step 20 of 40") == 3  # the run, and each rank
    assert "mean loss 0.5669" in text and "loss 0.0500" in text and "loss 1.05" in text
    assert text.count("1,024 samples/s") == 2 and "2,048 samples/s in all" in text
    assert text.count("3fa2 ") == 2 and "same weights on all ranks" in text
    assert "mean over ranks, weighted by samples" in text
    bar = next(e for e in seen(shown(2, steps(2, 20))).all("div") if e.get("role") == "progressbar")
    assert bar["aria-valuenow"] == "50"


def test_the_chart_is_valid_labelled_and_has_a_text_alternative(output):
    html = shown(2, steps(2, 20))._html()
    svg = html[html.index('<svg role="img"') : html.rindex("</svg>") + 6]
    chart = ElementTree.fromstring(svg)
    assert chart.get("aria-label").startswith("Line chart of loss against the step. mean loss 0.5669")
    words = [element.text for element in chart.iter() if element.tag == "text"]
    assert "step" in words and {"0.0", "0.5", "1.0", "1.5", "2.0"} <= set(words)
    lines = [element for element in chart.iter() if element.tag == "polyline"]
    assert len({(line.get("stroke"), line.get("stroke-dasharray")) for line in lines}) == 3  # two ranks, the mean
    x, y = map(float, lines[1].get("points").split()[0].split(","))
    assert (x, y) == (0, pytest.approx(dashboard.HEIGHT / 2, abs=0.1))  # loss 1.0 of at most 2.0 at the first step


def test_redrawn_at_most_five_times_a_second(output, monkeypatch):
    now = 100.0
    monkeypatch.setattr(dashboard, "time", SimpleNamespace(monotonic=lambda: now, time=time.time))
    view = Dashboard(1)
    drawn = []
    view.widget.observe(lambda change: drawn.append(now), "value")
    for step in range(100):  # twenty ticks a second for five seconds
        now = 100.0 + step / 20
        view(metrics(0, now, step=step, total_steps=100, loss=1.0))
        view.tick()
    assert 20 <= len(drawn) <= 25
    assert re.search(r"step 9\d of 100", view.widget.value)


def test_events_that_came_after_the_last_call_are_in_the_picture(output):
    events = [*steps(2, 5), Event(1, 9.0, "error", {"type": "ValueError", "message": "no"}), Event(0, 9.1, "stopped")]
    view = shown(2, events[:4])
    view.close(ended(events, "failed on rank 1"))
    alt = output.updates[0][1]["image/png"]["alt"]
    assert alt.startswith("DDP Lab: 2 ranks, failed on rank 1")
    assert "rank 0 stopped, step 5 of 10" in alt and "rank 1 failed: ValueError: no" in alt


@pytest.mark.parametrize("run", [None, ended([], "interrupted"), ended([], "running")])
def test_every_end_leaves_a_picture(output, run):
    Dashboard(2).close(run)
    data, metadata = output.updates[0]
    assert "image/png" in data
    assert "rank 0 stopped" in metadata["image/png"]["alt"]


def test_a_picture_that_fails_does_not_hide_the_run(output, monkeypatch):
    monkeypatch.setattr(dashboard, "draw_summary", lambda *_: 1 / 0)
    view = Dashboard(1)
    view.close()
    assert "no picture: ZeroDivisionError" in output.updates[0][0]["text/plain"]
    assert view.widget is None


def test_a_million_points_cost_no_more_than_a_thousand(output):
    view = Dashboard(2)
    sizes = {}
    for step in range(500_000):
        for rank in (0, 1):
            view(metrics(rank, step / 1000, step=step, total_steps=500_000, loss=1 / (step + 1)))
        if step in (499, 499_999):
            page = seen(view)
            sizes[step] = [len(view._html()), sum(len(line["points"].split()) for line in page.all("polyline"))]
    assert sizes[499_999][1] <= 3 * MAX_POINTS
    assert sizes[499_999][0] <= 1.2 * sizes[499][0] <= 24_000
    assert sum(map(len, view.progress.curves.buckets.values())) <= 2 * MAX_POINTS


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_number_leaves_a_gap(output, bad):
    events = [metrics(0, step=step, loss=bad if step in (3, 5) else 1.0) for step in range(8)]
    lines = seen(shown(1, events)).all("polyline")
    assert [len(line["points"].split()) for line in lines] == [3, 2, 2]  # the lone point twice, or it would not show
    assert "nan" not in lines[0]["points"]
    assert f"loss {bad}" in seen(shown(1, [*events, metrics(0, step=9, loss=bad)])).text


def test_text_of_the_learner_is_text(output):
    evil = '<script>alert("1")</script>'
    view = Dashboard(2, title=evil)
    view(metrics(0, step=1, **{evil: 1.0}, fingerprint="<b>"))
    view(Event(1, 1.0, "error", {"type": "E" + evil, "message": '"><img src=x>\ud800\x1b[0m'}))
    page = seen(view)
    assert {tag for tag, _ in page.elements} <= {
        "div",
        "span",
        "b",
        "svg",
        "path",
        "rect",
        "line",
        "text",
        "polyline",
        "code",
    }
    assert evil in page.text and '"><img src=x> [0m' in page.text
    view.widget.value.encode()


@settings(deadline=None, max_examples=25, suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(st.integers(0, 2), st.dictionaries(NAMES, ANYTHING)), max_size=6))
def test_whatever_is_logged_is_drawn(output, logged):
    view = shown(2, [metrics(rank, **data) for rank, data in logged])
    assert seen(view).text
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        view.close()
    assert "image/png" in output.updates[-1][0]


@pytest.mark.parametrize("ranks", range(1, 17))
def test_every_world_size_shows_every_rank(output, ranks):
    page = seen(shown(ranks, steps(ranks, 30, fingerprint="ab12")))
    assert all(f"rank {rank} " in page.text for rank in range(ranks))
    assert len(page.all("polyline")) == ranks + (ranks > 1)
    assert len(page.text) < 1500 and page.text.count("ab12") == ranks


def test_without_any_number_the_states_are_shown(output):
    page = seen(shown(1, [Event(0, 0.0, "running"), metrics(0, note="hi")]))
    assert "running" in page.text and not page.all("polyline") and "-" not in page.text


def test_a_silent_rank_is_pointed_out(output):
    view = shown(1, [metrics(0, time.time() - 30, step=3, loss=1.0)])
    assert "silent for 30 s, step 3" in seen(view).text


def test_text_is_legible_in_both_themes():
    softest = min(float(percent) / 100 for percent in re.findall(r"currentColor (\d+)%", dashboard.STYLE))
    for background, ink, strength in ((WHITE, "#000000", 0.87), (JUPYTER_DARK, WHITE, 0.87)):  # JupyterLab's own inks
        card = mixed(background, "#808080", 0x1A / 255)
        assert contrast(mixed(card, ink, strength * softest), card) >= 4.5


def mixed(below: str, above: str, strength: float) -> str:
    pairs = [(int(below[i : i + 2], 16), int(above[i : i + 2], 16)) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(b + (a - b) * strength):02x}" for b, a in pairs)


def test_in_a_real_kernel_one_display_one_update_and_a_closed_widget():
    code = """
from ddp_lab.dashboard import Dashboard
from ddp_lab.events import Event
view = Dashboard(2)
for step in range(30):
    for rank in (0, 1):
        view(Event(rank, step / 10, "metrics", {"step": step, "total_steps": 30, "loss": 1 / (step + 1)}))
    view.drawn = 0
    view.tick()
view.close()
"""
    messages = []
    manager, client = start_new_kernel()
    try:
        client.execute_interactive(code, timeout=60, output_hook=messages.append)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    kinds = [message["msg_type"] for message in messages]
    assert kinds.count("display_data") == kinds.count("update_display_data") == 1
    assert not {"stream", "error", "clear_output"} & set(kinds)
    first = messages[kinds.index("display_data")]["content"]
    last = messages[kinds.index("update_display_data")]["content"]
    assert first["transient"] == last["transient"]
    assert first["data"]["text/plain"] == last["data"]["text/plain"]
    assert WIDGET_VIEW in first["data"] and list(last["data"]) == ["image/png", "text/plain"]
    closed = [message["content"]["comm_id"] for message in messages if message["msg_type"] == "comm_close"]
    assert first["data"][WIDGET_VIEW]["model_id"] in closed
