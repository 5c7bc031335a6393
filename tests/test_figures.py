"""Figures show what the log says, show themselves, and leave matplotlib's global state alone."""

import io
import math
import subprocess
import sys
import warnings

import matplotlib
import pytest
from IPython.core.formatters import DisplayFormatter
from PIL import Image

from ddp_lab import figures
from ddp_lab.charts import MAX_POINTS, style
from ddp_lab.events import Event, EventLog


def recorded(ranks: int = 2, steps: int = 20, **more) -> EventLog:
    """A run in which rank r's loss is r + 1 / (step + 1)."""
    log = EventLog([Event(rank, 0.0, "running") for rank in range(ranks)])
    for step in range(steps):
        for rank in range(ranks):
            data = {
                "step": step,
                "total_steps": steps,
                "loss": rank + 1 / (step + 1),
                "samples": 8,
                "fingerprint": "3fa2b",
            }
            log.append(Event(rank, step / 10, "metrics", data | more))
    for rank in range(ranks):
        log.append(Event(rank, steps / 10, "done"))
    return log


def texts(figure) -> list[str]:
    return [text.get_text() for text in figure.texts if text.get_text()]


def lines(figure) -> dict:
    return {line.get_label(): line for line in figure.axes[0].get_lines() if not line.get_label().startswith("_")}


def test_loss_has_a_line_per_rank_and_their_labelled_mean():
    drawn = lines(figures.loss(recorded(ranks=3)))
    assert set(drawn) == {"rank 0", "rank 1", "rank 2", "mean over ranks, weighted by samples"}
    assert list(drawn["rank 2"].get_xdata()) == list(range(20))
    assert drawn["rank 2"].get_ydata()[3] == 2.25
    assert drawn["mean over ranks, weighted by samples"].get_ydata()[3] == pytest.approx(1.25)
    assert [drawn[f"rank {rank}"].get_color() for rank in range(3)] == [style(rank)[0] for rank in range(3)]
    assert [drawn[f"rank {rank}"].get_linestyle() for rank in range(3)] == ["-", "--", "--"]


def test_axes_are_labelled_and_one_rank_needs_no_mean():
    figure = figures.loss(recorded(ranks=1))
    assert (figure.axes[0].get_xlabel(), figure.axes[0].get_ylabel()) == ("step", "loss")
    assert list(lines(figure)) == ["rank 0"]


def test_without_a_loss_the_first_number_and_without_any_a_sentence():
    log = EventLog([Event(0, 0.0, "metrics", {"note": "hi", "accuracy": 0.5})])
    assert figures.loss(log).axes[0].get_ylabel() == "accuracy"
    assert "no number was logged" in [text.get_text() for text in figures.loss(EventLog()).axes[0].texts]


def test_gaps_stay_gaps_and_a_lone_point_is_seen():
    log = EventLog(
        [Event(0, 0.0, "metrics", {"loss": loss}) for loss in (1.0, math.nan, 2.0, math.inf, 1e200, 3.0, 4.0)]
    )
    line, dots = figures.loss(log).axes[0].get_lines()
    assert [math.isnan(y) for y in line.get_ydata()] == [False, True, False, True, True, False, False]
    assert list(dots.get_xdata()) == [0, 2]
    figures.loss(log).png()


def test_many_points_are_drawn_as_few():
    log = EventLog([Event(0, 0.0, "metrics", {"loss": 1.0, "step": step}) for step in range(100_000)])
    figure = figures.loss(log)
    assert len(lines(figure)["rank 0"].get_xdata()) <= MAX_POINTS
    assert figure.axes[0].get_xlabel() == "step (each point: the mean of 1,024)"


def test_summary_tells_state_speed_and_fingerprint():
    said = texts(figures.summary(recorded(), "finished", 12.34))
    assert said[0] == "2 ranks, finished in 12.3 s"
    assert said[1] == "mean loss 0.5669 · 160 samples/s in all · same weights on all ranks"
    assert said[2:] == ["rank 0", "finished", "loss 0.0500", "80.00 samples/s", "3fa2",
                        "rank 1", "finished", "loss 1.05", "80.00 samples/s", "3fa2"]  # fmt: skip


def test_summary_of_a_failed_run_says_which_rank_and_why():
    log = EventLog(recorded().events[:20])
    log.append(Event(1, 3.0, "error", {"type": "ValueError", "message": "costs $5 or $6 <b>漢字</b>"}))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure = figures.summary(log, "failed on rank 1", 3.0)
        figure.png()  # no warning of letters that the font lacks
    assert not any(text.get_parse_math() for text in figure.texts)  # dollars are no formula
    said = texts(figure)
    assert said[0] == "2 ranks, failed on rank 1 after 3.0 s"
    assert "failed: ValueError: costs $5 or $6 <b>漢字</b>" in said
    assert "stopped, step 9 of 20" in said  # what did not end by itself was ended
    assert "rank 1 failed: ValueError" in figure.png_metadata()["alt"]


def test_summary_without_numbers_shows_the_states_only():
    figure = figures.summary(EventLog([Event(0, 0.0, "running"), Event(0, 1.0, "done")]))
    assert texts(figure) == ["1 rank, finished", "rank 0", "finished"]
    assert not figure.axes


@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 9, 16])
def test_pictures_are_small_and_show_every_rank(ranks):
    figure = figures.summary(recorded(ranks, steps=300))
    assert [f"rank {rank}" in texts(figure) for rank in range(ranks)] == [True] * ranks
    for picture in (figure, figures.loss(recorded(ranks, steps=300))):
        png, metadata = picture.png(), picture.png_metadata()
        assert len(png) <= 60_000
        assert metadata["width"] == 720 and metadata["height"] <= 560
        assert Image.open(io.BytesIO(png)).width == 1080
        plain = io.BytesIO()
        picture.savefig(plain, format="png", dpi=150)
        assert len(png) < 0.4 * len(plain.getvalue())


def test_a_figure_shows_itself_with_a_constant_text():
    data, metadata = DisplayFormatter().format(figures.loss(recorded()))
    assert data["text/plain"] == "<DDP Lab: loss, 2 ranks>"
    assert data["image/png"].startswith(b"\x89PNG")
    assert metadata["image/png"]["alt"] == "DDP Lab: loss, 2 ranks"


def test_settings_of_matplotlib_stay_as_they_were():
    before = dict(matplotlib.rcParams)
    figures.summary(recorded()).png()
    assert dict(matplotlib.rcParams) == before


@pytest.mark.parametrize("module", ["figures", "dashboard", "terminal"])
def test_pyplot_is_never_imported(module):
    program = (
        f"import sys, ddp_lab.{module}; print([m for m in ('matplotlib.pyplot', 'matplotlib') if m in sys.modules])"
    )
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip()
    assert loaded == ("[]" if module == "terminal" else "['matplotlib']")
