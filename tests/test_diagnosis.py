"""Every verdict from plain values; tests/test_launcher.py meets the same verdicts with real ranks."""

import pytest

from ddp_lab.diagnosis import RankError, diagnose
from ddp_lab.reports import RankReport
from ddp_lab.stacks import collective, without_fault_dump

LOST = "[/x/gloo/transport/tcp/pair.cc:561] Connection closed by peer [127.0.0.1]:4237. This is typically …"
TIMED_OUT = "[/x/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 3000ms for recv operation to complete"
TORCH = "/env/lib/python3.11/site-packages/torch"
CELL = "/tmp/ipykernel_1/2.py"
CELLS = {CELL: "Cell In[5]"}


def frames(line, call="all_reduce"):
    own = (CELL, line, "fn", "dist.all_reduce(t)")
    return [own, (f"{TORCH}/distributed/c10d_logger.py", 83, "wrapper", ""), *in_torch(call)]


def in_torch(call):
    places = {
        "backward": (f"{TORCH}/autograd/graph.py", 1, "_engine_run_backward", ""),
        "own": ("/env/lib/python3.11/selectors.py", 1, "select", ""),
    }
    return [places.get(call, (f"{TORCH}/distributed/distributed_c10d.py", 1, call, ""))]


def error(type_, message, frames_=None, code=None, cause=None, notes=()):
    stack = frames(7) if frames_ is None else frames_
    plain = {"type": type_, "message": message, "code": code, "frames": stack, "notes": list(notes)}
    return {**plain, "refusal": None, "cause": cause}


def done(rank, ended=1.0):
    return RankReport(rank, exit_code=0, ended=ended, done=True)


def failed(rank, ended, type_, message, **more):
    return RankReport(rank, exit_code=1, ended=ended, error=error(type_, message, **more))


def stopped(rank, where=None):
    return RankReport(rank, exit_code=-15, ended=9.0, stopped=True, where=where)


def test_no_verdict_when_every_rank_is_done():
    assert diagnose([done(0), done(1)], 60) is None


def test_the_victim_that_spoke_first_is_not_blamed():
    reports = [failed(0, 1.0, "RuntimeError", LOST), failed(1, 1.1, "ValueError", "bad labels\nmore")]
    verdict = diagnose(reports, 60, CELLS)
    assert (verdict.kind, verdict.rank) == ("error", 1)
    assert verdict.why == "Rank 1 failed at Cell In[5], line 7, in fn with ValueError: bad labels"
    assert verdict.details[0] == "Rank 0: as a consequence, it lost its connection in all_reduce"


def test_of_two_culprits_the_earlier_is_blamed():
    assert diagnose([failed(0, 2.0, "KeyError", "1"), failed(1, 1.0, "ValueError", "2")], 60).rank == 1


def test_a_learners_own_timeout_error_is_no_victims():
    reports = [failed(0, 2.0, "RuntimeError", LOST), failed(1, 1.0, "TimeoutError", "the download timed out")]
    assert diagnose(reports, 60).why.endswith("TimeoutError: the download timed out")


@pytest.mark.parametrize("code", [0, 3])
def test_leaving_is_not_returning(code):
    verdict = diagnose([done(0), failed(1, 1.0, "SystemExit", str(code), code=code)], 60, CELLS)
    assert (verdict.kind, verdict.rank) == ("exit", 1)
    assert f"sys.exit({code}) at Cell In[5], line 7" in verdict.why


@pytest.mark.parametrize(
    ("code", "word"),
    [(-9, "SIGKILL"), (-11, "SIGSEGV"), (-6, "SIGABRT"), (-7, "SIGBUS"), (-15, "SIGTERM"), (-63, "63")],
)
def test_a_death_by_signal_is_named(code, word):
    verdict = diagnose([failed(0, 1.0, "RuntimeError", LOST), RankReport(1, exit_code=code, ended=1.2)], 60)
    assert (verdict.kind, verdict.rank) == ("death", 1)
    assert word in verdict.why and verdict.cure


def test_memory_is_suspected_after_sigkill():
    assert "memory ran out" in diagnose([RankReport(0, exit_code=-9, ended=1.0)], 60).why


def test_an_exit_without_a_word_is_named_with_its_code():
    assert "exit code 5" in diagnose([RankReport(0, exit_code=5, ended=1.0)], 60).why


def test_the_line_that_crashed_is_read_from_pythons_dump():
    printed = (
        "step 1\nFatal Python error: Segmentation fault\n\nCurrent thread 0x1 (most recent call first):\n"
        f'  File "/env/lib/python3.11/ctypes/__init__.py", line 519 in string_at\n  File "{CELL}", line 4 in fn\n'
        '  File "/lab/ddp_lab/worker.py", line 46 in main\n'
    )
    verdict = diagnose([RankReport(0, exit_code=-11, ended=1.0, printed=printed)], 60, CELLS)
    assert "SIGSEGV at Cell In[5], line 4, in fn" in verdict.why
    assert without_fault_dump(printed) == "step 1\n"


def test_a_hang_names_the_rank_that_never_came():
    reports = [failed(0, 4.0, "RuntimeError", TIMED_OUT), stopped(1, frames(9, "own"))]
    verdict = diagnose(reports, 60, CELLS)
    assert (verdict.kind, verdict.rank) == ("hang", 1)
    assert verdict.why == (
        "Rank 0 waited 3 s in all_reduce at Cell In[5], line 7, in fn for rank 1, "
        "which was at Cell In[5], line 9, in fn"
    )


def test_a_hang_names_the_rank_that_had_returned():
    verdict = diagnose([failed(0, 4.0, "RuntimeError", TIMED_OUT), done(1)], 60)
    assert verdict.rank == 1 and "had already returned" in verdict.why


def test_different_collectives_are_named_the_same_way_whoever_times_out_first():
    timeouts = [
        failed(rank, ended, "RuntimeError", TIMED_OUT, frames_=frames(rank, call))
        for rank, ended, call in ((0, 4.1, "all_reduce"), (1, 4.0, "broadcast"))
    ]
    why = diagnose(timeouts, 60, CELLS).why
    assert why == (
        "Rank 0 waited 3 s in all_reduce at Cell In[5], line 0, in fn, "
        "while rank 1 was in broadcast at Cell In[5], line 1, in fn"
    )


def test_a_skipped_collective_is_blamed_on_the_rank_that_returned():
    verdict = diagnose([failed(0, 2.0, "RuntimeError", LOST), done(1)], 60)
    assert (verdict.kind, verdict.rank) == ("mismatch", 1)


def test_only_lost_connections_still_end_in_a_sentence():
    reports = [failed(0, 2.0, "RuntimeError", LOST), failed(1, 1.0, "RuntimeError", LOST)]
    assert diagnose(reports, 60).why.startswith("Rank 0 lost its connection in all_reduce")


def test_the_labs_own_refusal_is_passed_on():
    refused = {**error("Refusal", "why: cure", frames_=[]), "refusal": ("rank 1 finished, but …", "return numbers")}
    verdict = diagnose([done(0), RankReport(1, exit_code=1, ended=1.0, error=refused)], 60)
    assert (verdict.kind, str(verdict)) == ("result", "rank 1 finished, but …: return numbers.")


def test_an_error_is_not_hidden_by_a_barrier_in_its_cleaning_up():
    late = failed(1, 4.0, "RuntimeError", TIMED_OUT, cause=error("ValueError", "the real one", frames(9)))
    verdict = diagnose([failed(0, 4.1, "RuntimeError", TIMED_OUT), late], 60, CELLS)
    assert (verdict.rank, verdict.why) == (
        1,
        "Rank 1 failed at Cell In[5], line 9, in fn with ValueError: the real one",
    )


def test_a_victim_that_wraps_its_lost_connection_stays_a_victim():
    wrapped = failed(0, 1.0, "ValueError", "no gradients", cause=error("RuntimeError", LOST))
    assert diagnose([wrapped, RankReport(1, exit_code=3, ended=1.2)], 60).rank == 1
    assert diagnose([wrapped, done(1)], 60).kind == "mismatch"


@pytest.mark.parametrize("message", ["download timed out", "broken pipe to my camera"])
def test_a_learners_own_runtime_error_is_no_victims(message):
    own = failed(1, 1.0, "RuntimeError", message, frames_=frames(3, "own"))
    verdict = diagnose([failed(0, 0.9, "RuntimeError", LOST), own], 60, CELLS)
    assert (verdict.rank, verdict.kind) == (1, "error") and message in verdict.why


def test_a_lost_work_handle_is_a_victims_although_no_frame_of_torch_shows():
    waits = failed(0, 1.0, "RuntimeError", LOST, frames_=[(CELL, 3, "fn", "work.wait()")])
    assert diagnose([waits, RankReport(1, exit_code=-9, ended=1.1)], 60).rank == 1


def test_tensors_of_different_sizes_are_named_where_gloo_aborts():
    printed = "terminate called after throwing an instance of 'gloo::EnforceNotMet'"
    verdict = diagnose([RankReport(1, exit_code=-6, ended=1.0, printed=printed)], 60)
    assert "different sizes" in verdict.why and verdict.cure == "give every rank the same shape and dtype"


def test_a_loader_workers_error_says_what_happened():
    message = (
        "Caught KeyError in DataLoader worker process 0.\nOriginal Traceback (most …):\n  File …\nKeyError: 'no 3'"
    )
    why = diagnose([failed(0, 1.0, "KeyError", message)], 60).why
    assert why.endswith("KeyError: 'no 3' (in DataLoader worker process 0)")


def test_notes_and_earlier_errors_are_in_the_details():
    report = failed(0, 1.0, "ValueError", "bad", notes=["try again"], cause=error("KeyError", "'x'"))
    text = "\n".join(diagnose([report], 60, CELLS).details)
    assert "    try again" in text and "    after KeyError: 'x' at Cell In[5], line 7, in fn" in text


def test_a_verdict_has_a_bound():
    report = failed(0, 1.0, "ValueError", "x" * 10**6, frames_=[(CELL, 7, "fn", "fn()")] * 3000)
    verdict = diagnose([report], 60)
    assert len(str(verdict)) < 1000 and len("\n".join(verdict.details)) < 3000
    assert "(3000 times)" in "\n".join(verdict.details)


def test_a_rank_that_was_ended_early_is_said_to_have_been():
    reports = [failed(0, 1.0, "ValueError", "bad"), stopped(1, [])]
    assert diagnose(reports, 60).details[-1] == "Rank 1: ended by the lab, before it reached your function"


def test_a_stack_names_its_collective():
    assert collective(frames(1)) == "all_reduce"
    assert collective(frames(1, "backward")) == "backward, where DDP averages gradients"
    assert collective(frames(1, "own")) == "its own code"
    assert collective([]) == "its own code"


def test_the_error_shows_its_details_but_no_launcher():
    shown = RankError(diagnose([failed(1, 1.0, "ValueError", "bad")], 60, CELLS))._render_traceback_()
    assert shown[0].startswith("RankError: Rank 1 failed at Cell In[5], line 7, in fn with ValueError: bad: ")
    assert shown[1:] == ["Rank 1: ValueError: bad", "  Cell In[5], line 7, in fn", "    dist.all_reduce(t)"]
