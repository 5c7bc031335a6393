"""The space-time picture puts together what met, and says where each rank stands."""

from test_mismatch import by_rank, call

from ddp_lab import spacetime


def drawn(calls, ends, last=spacetime.COLUMNS):
    figure = spacetime.picture([each for of_rank in calls.values() for each in of_rank], ends, last)
    return figure, [text.get_text() for text in figure.texts if text.get_text()]


def test_what_met_is_one_column():
    calls = [call(0, 1, start=1.0), call(1, 1, start=2.0), call(1, 2, start=3.0), call(0, 2, start=4.0)]
    first, second = spacetime.columns(calls)
    assert (first.title, sorted(first.calls), first.start, first.stop(9.0)) == ("call 1", [0, 1], 1.0, 2.0)
    assert (second.title, second.start) == ("call 2", 3.0)


def test_sends_and_receives_meet_by_their_order_and_groups_are_named():
    calls = [call(0, 0, "send", root=1), call(1, 0, "recv", root=0), call(0, 1, group="2")]
    assert [column.title for column in spacetime.columns(calls)] == ["send, recv 1", "call 1, group 2"]


def test_the_picture_names_calls_ends_and_what_was_not_called():
    figure, texts = drawn(
        by_rank(call(0), call(1), call(0, 2, "barrier", dtype="", end=None)), ["timed out", "returned"]
    )
    assert {"rank 0", "rank 1", "call 1", "1.0 s", "call 2", "never ended", "barrier", "3 float32"} <= set(texts)
    assert texts.count("not called") == 1 and {"timed out", "returned"} <= set(texts)
    assert repr(figure) == "<DDP Lab: where 2 ranks stand>"
    assert figure.alt == "DDP Lab: where 2 ranks stand. rank 0 timed out. rank 1 returned"
    assert figure._repr_png_()[0].startswith(b"\x89PNG")


def test_the_odd_one_is_marked_and_only_the_latest_are_shown():
    calls = by_rank(call(0), call(1), call(0, 2), call(1, 2, "broadcast", root=0))
    figure, texts = drawn(calls, ["returned"] * 2, last=1)
    assert "call 1" not in texts
    assert [text.get_color() for text in figure.texts if text.get_text() == "broadcast"] == [spacetime.ODD]
    assert spacetime.ODD not in [text.get_color() for text in figure.texts if text.get_text() == "all_reduce"]


def test_a_run_without_collectives_has_a_picture_too():
    assert "no collective was called" in drawn({}, ["returned"])[1]
