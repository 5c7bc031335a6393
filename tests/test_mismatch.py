"""Where sequences of calls part, from plain values; tests/test_faults.py meets the same with real ranks."""

from ddp_lab import mismatch
from ddp_lab.mismatch import SAME_CALLS, SAME_STEPS, SAME_TENSORS, WHOLE_MODEL, first_parting
from ddp_lab.tracing import GRADIENTS, WRAPPER, Collective

NAMES = {"/tmp/2.py": "Cell In[5]"}


def call(rank, seq=1, op="all_reduce", **more):
    plain = {
        "number": seq,
        "group": "0",
        "ranks": (),
        "name": op,
        "within": "",
        "shape": (3,),
        "dtype": "float32",
        "elements": 3,
        "root": -1,
        "nth": 1,
        "start": 1.0,
        "end": 2.0,
        "failed": False,
        "file": "/tmp/2.py",
        "line": 7,
        "function": "fn",
    }
    return Collective(**{**plain, "rank": rank, "seq": seq, "op": op, **more})


def by_rank(*calls):
    return {rank: [each for each in calls if each.rank == rank] for rank in {each.rank for each in calls}}


def test_equal_sequences_do_not_part():
    assert first_parting(by_rank(call(0), call(1), call(0, 2, "barrier"), call(1, 2, "barrier"))) is None


def test_the_first_difference_is_found_and_the_odd_rank_blamed():
    calls = by_rank(call(0), call(1), call(2), call(0, 2), call(1, 2, "barrier"), call(2, 2), call(0, 3), call(2, 3))
    parting = first_parting(calls)
    assert (parting.call.rank, parting.call.seq, parting.other.rank) == (1, 2, 0)
    assert first_parting(by_rank(call(0, dtype="int32"), call(1), call(2))).call.rank == 0
    assert first_parting(by_rank(call(0, dtype="int32"), call(1))).call.rank == 1


def test_what_must_be_the_same():
    assert first_parting(by_rank(call(0), call(1, elements=4)))
    assert first_parting(by_rank(call(0), call(1, dtype="float64")))
    assert first_parting(by_rank(call(0, 1, "broadcast", root=0), call(1, 1, "broadcast", root=1)))
    assert not first_parting(by_rank(call(0, shape=(3, 1)), call(1)))  # the backend sees three numbers
    assert not first_parting(by_rank(call(0, 1, "scatter", elements=6), call(1, 1, "scatter")))


def test_a_tolerant_look_allows_what_some_backend_allows():
    uneven = by_rank(call(0, 1, "all_gather"), call(1, 1, "all_gather", elements=4))
    assert first_parting(uneven) and not first_parting(uneven, tolerant=True)


def test_groups_are_compared_each_for_itself():
    pair = {"group": "1", "ranks": (0, 2)}
    calls = by_rank(call(0, 1, "barrier", **pair), call(0), call(1), call(2), call(2, 1, "barrier", **pair))
    assert first_parting(calls) is None
    assert mismatch.missing(call(0, 1, **pair), calls) == []
    assert mismatch.missing(call(0, 1, group="2", ranks=(1, 2)), calls) == [1, 2]


def test_sends_and_receives_are_not_compared():
    calls = by_rank(call(0, 0, "send", root=1), call(1, 0, "recv", root=0), call(1, 0, "recv", root=0))
    assert first_parting(calls) is None
    assert mismatch.missing(call(1, 0, "recv"), calls) == []


def test_the_latest_call_that_has_not_ended_is_found():
    assert mismatch.unfinished([call(0), call(0, 2, end=None), call(0, 3)]).seq == 2
    assert mismatch.unfinished([call(0)]) is None


def test_a_call_left_out_is_found_unless_something_failed():
    calls = by_rank(call(0), call(1), call(0, 2, "broadcast", root=0))
    assert mismatch.left_out(calls)[0] == 1 and mismatch.left_out(calls)[1].seq == 2
    assert mismatch.left_out(by_rank(call(0), call(1), call(0, 2, end=None))) is None
    assert mismatch.left_out(by_rank(call(0), call(1))) is None


def test_calls_are_named_as_the_learner_knows_them():
    assert mismatch.said(call(0), NAMES) == "all_reduce of (3,) float32 at Cell In[5], line 7, in fn"
    assert mismatch.said(call(0, op="barrier", dtype="", file=""), NAMES) == "barrier"
    assert mismatch.said(call(0, op="broadcast", root=1), NAMES).startswith("broadcast from rank 1 of (3,) float32")
    assert mismatch.said(call(0, op="reduce", root=1), NAMES).startswith("reduce to rank 1 of (3,) float32")
    assert mismatch.said(call(0, within=GRADIENTS, file=""), NAMES) == (
        "backward, where DDP averages gradients (all_reduce of (3,) float32)"
    )


def test_counts_are_told_where_they_differ():
    calls = by_rank(*(call(0, n, nth=n) for n in (1, 2, 3)), *(call(1, n, nth=n) for n in (1, 2, 3, 4)))
    assert mismatch.tally(calls[1][-1], calls) == " (calls of that line so far: rank 0: 3, rank 1: 4)"
    assert mismatch.tally(call(0), by_rank(call(0), call(1))) == ""


def test_the_cure_fits_the_difference():
    uneven = by_rank(call(0, within=GRADIENTS), call(1, within=GRADIENTS), call(1, 2, within=GRADIENTS, nth=2))
    assert mismatch.cure(call(0), call(1, elements=4), {}) == SAME_TENSORS
    assert mismatch.cure(call(0, 2, "barrier"), uneven[1][1], uneven) == SAME_STEPS
    assert mismatch.cure(call(0, within=WRAPPER, op="broadcast"), call(1, op="barrier"), {}) == WHOLE_MODEL
    assert mismatch.cure(call(0), call(1, op="barrier"), {}) == SAME_CALLS
