"""Memory stays bounded and means exact; ranks can be told apart by everyone, on light and dark."""

import itertools
import math

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from ddp_lab import charts

PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # machines that test may be slow
WHITE, JUPYTER_DARK = "#ffffff", "#111111"
# What people with a kind of colour blindness see, in linear RGB, at full severity: Machado, Oliveira and Fernandes,
# https://www.inf.ufrgs.br/~oliveira/pubs_files/CVD_Simulation/CVD_Simulation.html
SIGHT = {
    "normal": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.01182, 0.04294, 0.968881)),
    "tritanopia": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.3039)),
}
# From linear RGB to Oklab, where distances are about what is seen: https://bottosson.github.io/posts/oklab/
CONES = ((0.4122214708, 0.5363325363, 0.0514459929), (0.2119034982, 0.6806995451, 0.1073969566),
         (0.0883024619, 0.2817188376, 0.6299787005))  # fmt: skip
OPPONENTS = ((0.2104542553, 0.793617785, -0.0040720468), (1.9779984951, -2.428592205, 0.4505937099),
             (0.0259040371, 0.7827717662, -0.808675766))  # fmt: skip


def linear(colour: str) -> list[float]:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]


def times(matrix, vector):
    return [sum(a * b for a, b in zip(row, vector, strict=True)) for row in matrix]


def contrast(one: str, other: str) -> float:
    """As WCAG defines it: https://www.w3.org/TR/WCAG22/#dfn-contrast-ratio"""
    light, dark = sorted((times([(0.2126, 0.7152, 0.0722)], linear(c))[0] for c in (one, other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def seen(colour: str, sight: str) -> list[float]:
    rgb = [min(1.0, max(0.0, part)) for part in times(SIGHT[sight], linear(colour))]
    return times(OPPONENTS, [math.cbrt(part) for part in times(CONES, rgb)])


@pytest.mark.parametrize("colour", [*charts.COLOURS, charts.NEUTRAL])
@pytest.mark.parametrize("background", [WHITE, JUPYTER_DARK])
def test_lines_stand_out_in_both_themes(colour, background):
    assert contrast(colour, background) >= 3


@pytest.mark.parametrize("sight", SIGHT)
def test_colours_differ_for_every_kind_of_sight(sight):
    pairs = itertools.combinations(charts.COLOURS, 2)
    nearest = min(math.dist(seen(one, sight), seen(other, sight)) for one, other in pairs)
    assert nearest > 0.07  # Okabe and Ito's own eight have a pair at 0.02


def test_no_two_ranks_look_alike_and_neighbours_differ_in_both():
    styles = [charts.style(rank) for rank in range(64)]
    assert len(set(styles)) == 64
    assert all(a[0] != b[0] and a[1] != b[1] for a, b in itertools.pairwise(styles[:16]))


def test_a_fingerprint_decides_its_swatch():
    assert charts.fingerprint_colours("3fa2") == charts.fingerprint_colours("3fa2")
    swatches = {tuple(charts.fingerprint_colours(f"{number:x}")) for number in range(2000)}
    assert len(swatches) > 450  # of 512
    assert len(charts.fingerprint_colours("no hex \ud800")) == 3


def test_a_million_points_take_no_more_room_than_a_thousand():
    curves = charts.Curves()
    for step in range(1_000_000):
        curves.add(0, step, float(step), 1.0)
    line = curves.line(0)
    assert charts.MAX_POINTS / 2 <= len(line) <= charts.MAX_POINTS
    assert curves.width == 8192
    assert line[0] == (4095.5, 4095.5)  # the mean of 8,192 steps, in their middle
    assert curves.axis() == "step (each point: the mean of 8,192)"


def test_all_ranks_share_the_width_that_the_longest_needs():
    curves = charts.Curves()
    for step in range(300):
        curves.add(0, step, 1.0)
    curves.add(1, 0, 5.0)
    curves.add(1, 1, 7.0)
    assert curves.width == 4
    assert curves.line(1) == [(1.5, 6.0)]


@PATIENT
@given(st.lists(st.tuples(st.integers(0, 10**12), st.floats(-1e6, 1e6), st.floats(1, 1e3)), min_size=1, max_size=600))
def test_merging_loses_no_value_and_no_weight(points):
    curves = charts.Curves()
    for place, value, weight in sorted(points):
        curves.add(0, float(place), value, weight)
    buckets = curves.buckets[0]
    assert len(buckets) <= charts.MAX_POINTS
    assert math.isclose(sum(b[2] for b in buckets), sum(w for _, _, w in points))
    total = math.fsum(v * w for _, v, w in points)
    assert math.isclose(sum(b[1] for b in buckets), total, abs_tol=1e-3 + 1e-9 * sum(abs(v) * w for _, v, w in points))
    assert [b[0] for b in buckets] == sorted({b[0] for b in buckets})


def test_the_mean_is_weighted_by_samples_and_only_where_all_ranks_have_a_value():
    curves = charts.Curves()
    for step, loss in enumerate([1.0, 2.0, 3.0]):
        curves.add(0, step, loss, 30)
    for step, loss in enumerate([5.0, 6.0]):
        curves.add(1, step, loss, 10)
    assert curves.mean(weighted=True) == [(0, 2.0), (1, 3.0)]
    assert curves.mean(weighted=False) == [(0, 3.0), (1, 4.0)]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e300])
def test_a_value_that_cannot_be_drawn_cuts_the_line(bad):
    curves = charts.Curves()
    for step, value in enumerate([bad, 1.0, 2.0, bad, bad, 3.0, bad]):
        curves.add(0, step, value)
    assert charts.segments(curves.line(0)) == [[(1, 1.0), (2, 2.0)], [(5, 3.0)]]


def test_one_bad_value_among_thousands_still_leaves_its_gap():
    curves = charts.Curves()
    for step in range(100_000):
        curves.add(0, step, math.nan if step == 50_000 else 1.0)
    assert len(charts.segments(curves.line(0))) == 2


@PATIENT
@example(0.0, 5e-324, 5)
@example(1e29, 1.0000000000000002e29, 5)
@given(st.floats(-1e29, 1e29), st.floats(-1e29, 1e29), st.integers(3, 8))
def test_ticks_enclose_the_data_and_are_few_and_round(low, high, most):
    low, high = sorted((low, high))
    ticks = charts.ticks(low, high, most)
    assert 2 <= len(ticks) <= most + 1
    room = 1e-6 * (abs(low) + abs(high))
    assert ticks[0] <= low + room and ticks[-1] >= high - room
    assert ticks == sorted(set(ticks))
    assert all(charts.tick_text(tick, ticks) for tick in ticks)


def test_ticks_of_a_loss_and_of_steps():
    ticks = charts.ticks(0.31, 2.36, 5)
    assert [charts.tick_text(tick, ticks) for tick in ticks] == ["0.0", "0.5", "1.0", "1.5", "2.0", "2.5"]
    assert charts.ticks(0, 3, 6, whole=True) == [0, 1, 2, 3]


@pytest.mark.parametrize("value", [0.0, 5e-324, 1e-300, 1.0, -1e29])
def test_ticks_around_a_single_value(value):
    ticks = charts.ticks(value, value)
    assert ticks[0] < value < ticks[-1]


@pytest.mark.parametrize(
    ("value", "text"),
    [(12345.6, "12,346"), (0.43119, "0.4312"), (2.3456, "2.35"), (0.0, "0.0000"), (1.23e-7, "1.23e-07"),
     (math.nan, "nan"), (-math.inf, "-inf"), (None, "-"), (4.2e12, "4.2e+12")],
)  # fmt: skip
def test_numbers_in_few_characters(value, text):
    assert charts.amount(value) == text


def test_short_texts_are_one_printable_line():
    assert charts.short("a\nb\x1b[31m\ud800\tc") == "a b [31m c"
    assert charts.short("x" * 100, 10) == "xxxxxxxxx…"
    assert charts.short("x" * 10, 10) == "x" * 10
