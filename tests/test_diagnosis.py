"""Every verdict from plain values; tests/test_launcher.py meets the same verdicts with real ranks."""

from dataclasses import replace

import pytest
from test_mismatch import call as plain_call

from ddp_lab import cures
from ddp_lab.diagnosis import RankError, diagnose
from ddp_lab.mismatch import LONGER_PHASE, SAME_CALLS, SAME_GROUPS, SAME_STEPS, SAME_TENSORS, SEND_FIRST
from ddp_lab.phases import PHASE
from ddp_lab.reports import RankReport
from ddp_lab.stacks import collective, without_fault_dump
from ddp_lab.tracing import GRADIENTS

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


# ---- what the traced calls tell ------------------------------------------------------------------------------------


def call(rank, *args, **more):
    return plain_call(rank, *args, **{"file": CELL, **more})


def waiting(rank, ended=4.0, message=TIMED_OUT, **last):
    """A rank that waited in vain in the call that `last` describes."""
    report = failed(rank, ended, "RuntimeError", message)
    return replace(report, calls=[call(rank, **{"end": None, **last})])


def test_calls_that_met_and_differ_explain_a_lost_connection():
    reports = [waiting(0, message=LOST), waiting(1, message=LOST, op="barrier", shape=(), dtype="", line=9)]
    verdict = diagnose(reports, 60, CELLS)
    assert (verdict.kind, verdict.rank, verdict.cure) == ("mismatch", 1, SAME_CALLS)
    assert verdict.why == (
        "Rank 1 called barrier at Cell In[5], line 9, in fn "
        "where rank 0 called all_reduce of (3,) float32 at Cell In[5], line 7, in fn"
    )


def test_of_three_ranks_the_odd_one_is_blamed_and_tensors_get_their_cure():
    reports = [waiting(0, message=LOST, dtype="int32"), waiting(1, message=LOST), waiting(2, message=LOST)]
    verdict = diagnose(reports, 60, CELLS)
    assert (verdict.kind, verdict.rank, verdict.cure) == ("mismatch", 0, SAME_TENSORS)


def test_different_calls_that_no_rank_noticed_are_told_although_all_are_done():
    reports = [replace(done(rank), calls=[call(rank, dtype=dtype)]) for rank, dtype in ((0, "float32"), (1, "int32"))]
    verdict = diagnose(reports, 60)
    assert (verdict.kind, verdict.rank, verdict.cure) == ("mismatch", 1, SAME_TENSORS)
    assert diagnose([replace(report, calls=[]) for report in reports], 60) is None


def test_a_call_that_one_rank_left_out_is_told_although_all_are_done():
    reports = [replace(done(0), calls=[call(0), call(0, 2)]), replace(done(1), calls=[call(1)])]
    verdict = diagnose(reports, 60, CELLS)
    assert (verdict.kind, verdict.rank) == ("mismatch", 1)
    assert verdict.why.startswith("Rank 1 returned without a call that rank 0 made: all_reduce of (3,) float32 at Cell")


def test_an_error_of_ones_own_comes_before_a_difference_in_the_calls():
    reports = [waiting(0, message=LOST), replace(failed(1, 9.0, "ValueError", "bad", frames_=frames(9, "own")))]
    reports[1] = replace(reports[1], calls=[call(1, op="barrier")])
    assert diagnose(reports, 60).why.endswith("ValueError: bad")


def test_a_thread_that_failed_is_blamed_for_the_wait_of_others():
    thread_error = error("KeyError", "'x'", frames(3))
    reports = [waiting(0), replace(stopped(1, frames(9, "own")), thread_error=thread_error)]
    verdict = diagnose(reports, 60, CELLS)
    assert (verdict.kind, verdict.rank) == ("error", 1)
    assert verdict.why == "A thread of rank 1 failed at Cell In[5], line 3, in fn with KeyError: 'x'"
    assert diagnose([done(0), replace(done(1), thread_error=thread_error)], 60) is None  # nobody waited for it


def test_a_rank_that_waits_for_rank_0_at_the_end_of_a_phase_is_told_its_name():
    reports = [stopped(0, frames(9, "own")), waiting(1, group=f"x{PHASE}download", op="barrier")]
    verdict = diagnose(reports, 60, CELLS)
    assert (verdict.rank, verdict.cure) == (0, LONGER_PHASE)
    assert verdict.why.startswith("Rank 1 waited 3 s in rank0_phase('download')")


def test_ranks_that_wait_in_two_groups_are_told_so():
    reports = [waiting(0, group="a", ranks=(0, 1)), stopped(1, frames(9))]
    reports[1] = replace(reports[1], calls=[call(1, group="b", ranks=(0, 1), end=None)])
    verdict = diagnose(reports, 60, CELLS)
    assert verdict.cure == SAME_GROUPS
    assert verdict.why.endswith("while rank 1 was in all_reduce of another process group at Cell In[5], line 9, in fn")


def test_two_ranks_that_both_receive_are_told_to_send_first():
    reports = [waiting(0, op="recv"), replace(stopped(1, frames(9, "recv")), calls=[call(1, op="recv", end=None)])]
    assert diagnose(reports, 60).cure == SEND_FIRST


@pytest.mark.parametrize(("absent", "blamed"), [((1,), 1), ((1, 2), 0)])
def test_of_three_ranks_those_are_right_that_are_more(absent, blamed):
    left = [done(rank) for rank in absent]
    reports = [waiting(rank, message=LOST) for rank in range(3) if rank not in absent] + left
    verdict = diagnose(reports, 60)
    assert (verdict.kind, verdict.rank) == ("mismatch", blamed)
    assert ("rank 1 had" if len(absent) == 1 else "ranks 1 and 2 had") in verdict.why


def test_unequal_numbers_of_backward_passes_are_counted():
    backward = {"within": GRADIENTS, "message": LOST}
    ended = replace(done(1), calls=[call(1, 3, within=GRADIENTS, nth=3)])
    verdict = diagnose([waiting(0, seq=4, nth=4, **backward), ended], 60)
    assert (verdict.kind, verdict.rank, verdict.cure) == ("mismatch", 1, SAME_STEPS)
    assert "(backward passes so far: rank 0: 4, rank 1: 3)" in verdict.why


MESSAGES = {  # as PyTorch, gloo and Python word them
    "ValueError: trying to initialize the default process group twice!": "destroy_process_group",
    "ValueError: Default process group has not been initialized, please make sure …": "init_process_group('gloo')",
    "ValueError: Global rank 9 is not part of group <ProcessGroup>": "from 0 to",
    "ValueError: init_process_group waits for 3 ranks, and 2 ranks are too few": "leave out rank",
    "RuntimeError: Expected to have finished reduction in the prior iteration before starting": "find_unused",
    "RuntimeError: Expected to mark a variable ready only once.": "static_graph",
    "RuntimeError: DistributedDataParallel is not needed when a module doesn't have any parameter that requires a "
    "gradient.": "the model itself",
    "RuntimeError: DDP expects same model across all ranks, but Rank 0 has 4 params, while rank 1 has inconsistent 2 "
    "params.": "same model",
    "RuntimeError: [enforce fail at gloo/transport/tcp/device.cc:84] ifa != nullptr": "GLOO_SOCKET_IFNAME",
    "RuntimeError: makeDevice(): unsupported gloo device": "Linux and macOS",
    "RuntimeError: No backend type associated with device type cpu": "device of the backend",
    "RuntimeError: DataLoader worker (pid(s) 77) exited unexpectedly": "num_workers=0",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB": "fewer ranks",
    "OSError: [Errno 28] No space left on device": "free some space",
    "PermissionError: [Errno 13] Permission denied: '/weights.pt'": "folder of your own",
    "OSError: [Errno 24] Too many open files": "ulimit -n",
    "RuntimeError: Cannot re-initialize CUDA in forked subprocess.": "CPU's work",
    "DistNetworkError: The server socket has failed to listen on any local network address. EADDRINUSE": "free port",
    "socket.gaierror: [Errno -2] Name or service not known": "leave out init_method",
    "NameError: name 'get_ipython' is not defined": "magics",
    "ModuleNotFoundError: No module named 'my_code'": "install it",
    "EOFError: EOF when reading a line": "keyboard",
    "KeyboardInterrupt: ": "return",
}


@pytest.mark.parametrize("message", MESSAGES)
def test_a_known_error_gets_its_cure(message):
    assert MESSAGES[message] in cures.of(message)


def test_every_known_error_is_tested():
    assert {cures.of(message) for message in MESSAGES} == {*cures.KNOWN.values()}


def test_an_error_that_is_not_known_is_sent_to_its_traceback():
    assert cures.of("ValueError: my own words") == cures.TRACE_CURE


def test_a_stack_names_its_collective():
    assert collective(frames(1)) == "all_reduce"
    assert collective(frames(1, "backward")) == "backward, where DDP averages gradients"
    assert collective(frames(1, "own")) == "its own code"
    assert collective([]) == "its own code"


def test_the_error_shows_its_details_but_no_launcher():
    shown = RankError(diagnose([failed(1, 1.0, "ValueError", "bad")], 60, CELLS))._render_traceback_()
    assert shown[0].startswith("RankError: Rank 1 failed at Cell In[5], line 7, in fn with ValueError: bad: ")
    assert shown[1:] == ["Rank 1: ValueError: bad", "  Cell In[5], line 7, in fn", "    dist.all_reduce(t)"]
