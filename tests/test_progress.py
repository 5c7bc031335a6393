"""What is said of each rank follows from its events, and nothing that rank code logs breaks it."""

import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ddp_lab.charts import Curves, facts
from ddp_lab.events import Event
from ddp_lab.progress import MAX_FINGERPRINTS, Progress

ANYTHING = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.just(10**400), st.lists(st.floats()),
    st.complex_numbers(), st.binary(max_size=3), st.builds(object),
)  # fmt: skip
NAMES = st.sampled_from(["step", "total_steps", "loss", "samples", "epoch", "fingerprint", "accuracy", "<b>", "µ"])


def metrics(rank: int, time: float = 0.0, **data) -> Event:
    return Event(rank, time, "metrics", data)


def test_a_rank_from_start_to_end():
    progress = Progress(1)
    rank = progress.ranks[0]
    assert progress.says() == "starting 1 process, this takes a few seconds"
    progress.add(Event(0, 1.0, "running"))
    assert rank.says() == progress.says() == "running"
    progress.add(metrics(0, step=0, total_steps=4, loss=1.0))
    assert rank.says() == "running, step 1 of 4"  # counted from 0, the first step is done
    assert rank.fraction() == progress.fraction() == 0.25
    progress.add(Event(0, 2.0, "done"))
    assert rank.says() == progress.says() == "finished"
    assert progress.fraction() == 1.0
    progress.end()
    assert rank.state == "finished"


def test_steps_counted_from_one_are_shown_as_logged():
    progress = Progress(1, [metrics(0, step=step, total_steps=4) for step in (1, 2, 3)])
    assert progress.ranks[0].says() == "running, step 3 of 4"
    assert progress.fraction() == 0.75
    assert Progress(1, [metrics(0, step=3, loss=1.0)]).fraction() is None


@pytest.mark.parametrize(
    ("event", "says"),
    [
        (Event(0, 1.0, "error", {"type": "ValueError", "message": "no"}), "failed: ValueError: no"),
        (Event(0, 1.0, "error", {"type": "KeyError", "message": ""}), "failed: KeyError"),
        (Event(0, 1.0, "error", {"exit_code": -9}), "failed: died of SIGKILL"),
        (Event(0, 1.0, "error", {"exit_code": 3}), "failed: exit code 3"),
        (Event(0, 1.0, "error", {"exit_code": -999}), "failed: exit code -999"),
        (Event(0, 1.0, "error", {}), "failed: exit code None"),
        (Event(0, 1.0, "stopped", {"exit_code": -15}), "stopped"),
        (Event(0, 1.0, "unheard of", {}), "starting"),
    ],
)
def test_ways_to_end(event, says):
    progress = Progress(2, [event])
    assert progress.ranks[0].says() == says
    if "failed" in says:
        assert progress.says() == "rank 0 failed"


def test_the_first_end_counts():
    progress = Progress(1, [Event(0, 1.0, "done"), Event(0, 2.0, "stopped"), Event(0, 3.0, "running")])
    assert progress.ranks[0].state == "finished"


def test_the_whole_run_is_where_its_slowest_rank_is():
    progress = Progress(2, [metrics(0, step=9, total_steps=20), metrics(1, step=7, total_steps=20)])
    assert progress.says() == "running, step 7 of 20"


def test_a_silent_rank_is_shown():
    progress = Progress(1, [metrics(0, 100.0, step=1)])
    assert progress.ranks[0].says(104.0) == "running, step 1"
    assert progress.ranks[0].says(112.0) == "silent for 12 s, step 1"
    progress.add(Event(0, 113.0, "done"))
    assert progress.ranks[0].says(200.0) == "finished"


def test_speed_is_that_of_the_latest_seconds_and_of_the_whole_run():
    slow = [metrics(0, float(second), samples=10) for second in range(20)]
    fast = [metrics(0, 19 + 0.5 * half, samples=10) for half in range(1, 21)]
    progress = Progress(1, slow + fast)
    assert progress.ranks[0].rate() == pytest.approx(20.0)
    assert progress.ranks[0].rate(whole_run=True) == pytest.approx((19 + 20) * 10 / 29)
    assert progress.rate() == progress.ranks[0].rate()
    assert Progress(1, [metrics(0, 1.0, samples=10)]).rate() is None


def test_the_headline_is_the_mean_weighted_by_samples_where_all_log_them():
    assert Progress(2, [metrics(0, loss=1.0, samples=30), metrics(1, loss=5.0, samples=10)]).mean() == 2.0
    assert Progress(2, [metrics(0, loss=1.0, samples=30), metrics(1, loss=5.0)]).mean() == 3.0
    assert math.isnan(Progress(2, [metrics(0, loss=1.0), metrics(1, loss=math.nan)]).mean())


def test_the_loss_is_plotted_also_when_it_comes_later():
    curves = Curves()
    progress = Progress(1, [metrics(0, note="hi", ok=True, lr=0.1, accuracy=0.2), metrics(0, lr=0.2)], curves)
    assert progress.metric == "lr"
    assert curves.line(0) == [(0, 0.1), (1, 0.2)]  # without a step, the place in the series
    progress.add(metrics(0, step=5, loss=3.0))
    progress.add(metrics(0, step=6, lr=0.3))
    assert progress.metric == "loss"
    assert curves.line(0) == [(5, 3.0)]


def test_an_epoch_that_counts_from_zero_again_continues_the_axis():
    curves = Curves()
    Progress(1, [metrics(0, step=step, loss=1.0) for _ in range(2) for step in range(3)], curves)
    assert [x for x, _ in curves.line(0)] == [0, 1, 2, 3, 4, 5]


def test_replicas_are_compared_at_one_step_though_one_rank_is_ahead():
    progress = Progress(2, [metrics(0, step=1, fingerprint="aa"), metrics(1, step=1, fingerprint="aa")])
    progress.add(metrics(0, step=2, fingerprint="bb"))
    assert progress.fingerprints() == ({0: "aa", 1: "aa"}, "same weights on all ranks")
    progress.add(metrics(1, step=2, fingerprint="cc"))
    assert progress.fingerprints() == ({0: "bb", 1: "cc"}, "weights differ between ranks")
    assert facts(progress) == "weights differ between ranks"


def test_no_verdict_on_replicas_before_all_have_spoken():
    progress = Progress(2, [metrics(0, step=1, fingerprint="aa")])
    assert progress.fingerprints() == ({0: "aa"}, "")
    progress.add(metrics(1, step=2, fingerprint="bb"))
    assert progress.fingerprints() == ({0: "aa", 1: "bb"}, "")  # of different steps
    two_of_three = Progress(3, [metrics(rank, step=1, fingerprint="aa") for rank in (0, 1)])
    assert two_of_three.fingerprints() == ({0: "aa", 1: "aa"}, "")


def test_without_steps_the_latest_common_fingerprints_are_compared_and_few_are_kept():
    events = [metrics(rank, fingerprint=f"{number}") for number in range(1000) for rank in (0, 1)]
    progress = Progress(2, events)
    assert progress.fingerprints() == ({0: "999", 1: "999"}, "same weights on all ranks")
    assert len(progress.ranks[0].fingerprints) == MAX_FINGERPRINTS


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # machines that test may be slow
@given(st.lists(st.tuples(st.integers(0, 2), st.dictionaries(NAMES, ANYTHING)), max_size=12))
def test_whatever_is_logged_nothing_raises(logged):
    progress = Progress(2, [metrics(rank, **data) for rank, data in logged], Curves())
    assert [rank.says() for rank in progress.ranks.values()]
    assert isinstance(facts(progress), str) and progress.says()
    assert progress.fraction() is None or 0 <= progress.fraction() <= 1
