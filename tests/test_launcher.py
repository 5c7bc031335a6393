"""launch and Run, with real ranks."""

import asyncio
import ctypes
import io
import os
import signal
import sys
import threading
import time
from datetime import timedelta

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import ddp_lab
from ddp_lab import RankError, launch

QUIET = {"on_event": None}


@pytest.fixture(autouse=True)
def _fast_and_clean(fast, nothing_left):
    yield


def total(rank, world_size, offset=0, *, scale=1):
    dist.init_process_group("gloo")
    tensor = torch.tensor([float(rank + offset)])
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    print(f"total {tensor.item():g}")
    return tensor * scale


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_results_outputs_and_exit_codes_by_rank(world_size, capsys):
    run = launch(total, 1, world_size=world_size, scale=2, **QUIET)
    expected = sum(range(1, world_size + 1))
    assert [result.item() for result in run.results] == [2 * expected] * world_size
    assert [run.output(rank) for rank in range(world_size)] == [f"total {expected}\n"] * world_size
    assert run.exit_codes == [0] * world_size
    assert capsys.readouterr().out == "".join(f"[rank {rank}] total {expected}\n" for rank in range(world_size))
    assert repr(run) == f"Run({world_size} rank{'s' * (world_size > 1)}, finished)"


def environment(rank, world_size):
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS"]
    return {name: os.environ[name] for name in names}, torch.get_num_threads(), os.environ.get("FROM_THE_NOTEBOOK")


def test_ranks_see_what_torchrun_would_set_and_what_the_notebook_set(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("FROM_THE_NOTEBOOK", "yes")
    before = dict(os.environ)
    for rank, (seen, threads, ours) in enumerate(launch(environment, **QUIET).results):
        assert seen == {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "OMP_NUM_THREADS": "1",
        }
        assert threads == 1 and ours == "yes"
    assert dict(os.environ) == before


def logs(rank, world_size, steps):
    for step in range(steps):
        ddp_lab.log(step=step, loss=torch.tensor(float(rank * 100 + step)))


def test_every_event_arrives_in_order():
    seen = []
    run = launch(logs, 2500, on_event=seen.append)
    assert run.log.events == seen
    for rank in (0, 1):
        assert run.log.series("loss", rank) == (list(range(2500)), [rank * 100.0 + step for step in range(2500)])
        kinds = [event.kind for event in run.log if event.rank == rank]
        assert kinds[0] == "starting" and kinds[1] == "running" and kinds[-1] == "done"


def test_loss_can_be_plotted():
    run = launch(logs, 5, **QUIET)
    assert run.plot_loss()._repr_png_()[0].startswith(b"\x89PNG")


class Display:
    def __init__(self):
        self.ticks, self.closed = 0, []

    def __call__(self, event):
        pass

    def tick(self):
        self.ticks += 1

    def close(self, run):
        self.closed.append(run.outcome)


def sleeps(rank, world_size, seconds):
    time.sleep(seconds)


def test_a_display_ticks_and_is_closed_once_whatever_happens():
    display = Display()
    launch(sleeps, 0.3, on_event=display)
    assert display.ticks >= 3
    with pytest.raises(RankError):
        launch(breaks, "raise", on_event=display)
    assert display.closed == ["finished", "failed on rank 1"]


def test_an_error_in_on_event_ends_the_ranks_and_is_raised():
    def broken(event):
        raise LookupError("mine")

    started = time.monotonic()
    with pytest.raises(LookupError, match="mine"):
        launch(sleeps, 30, on_event=broken)
    assert time.monotonic() - started < 5


# ---- what is refused before any process starts -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "options", "kind", "words"),
    [
        ((total,), {"world_size": 0}, ValueError, "world_size=0 starts no rank: use 1 or more"),
        ((total,), {"world_size": -2}, ValueError, "world_size=-2 starts no rank"),
        ((total,), {"world_size": 2.5}, TypeError, "world_size=2.5 is not a whole number"),
        ((total,), {"world_size": "2"}, TypeError, "world_size='2' is not a whole number"),
        ((total,), {"world_size": 10**6}, ValueError, "needs about .* GiB of memory .* use at most"),
        ((total,), {"timeout": 0}, ValueError, "timeout=0 is no number of seconds from 0.01 on"),
        ((total,), {"timeout": True}, ValueError, "timeout=True is no number of seconds"),
        ((lambda rank, world_size, timeout: 0,), {"timeout": 5}, TypeError, "rename its timeout, which launch keeps"),
        ((3,), {}, TypeError, "launch needs a function, and got 3"),
        ((total,), {"on_event": 3}, TypeError, "on_event=3 is neither a function"),
        ((lambda rank: rank,), {}, TypeError, "first two parameters take rank and world_size"),
        ((total, 1, 2), {}, TypeError, r"would call total\(rank, world_size, 1, 2\)"),
        ((total,), {"offsett": 1}, TypeError, "unexpected keyword argument 'offsett'"),
        ((total, threading.Lock()), {}, TypeError, "offset can't be sent to the ranks, because a lock"),
        ((lambda rank, world_size, backend: 0, "nccl"), {"world_size": 64}, ValueError, "backend='nccl' needs"),
        ((lambda rank, world_size, backend: 0, "mpi"), {}, ValueError, "backend='mpi' is not one"),
    ],
)
def test_wrong_input_is_refused_in_one_sentence_before_any_process(arguments, options, kind, words, monkeypatch):
    monkeypatch.setattr("ddp_lab.processes.Rank", None)  # starting one would be a TypeError of another kind
    with pytest.raises(kind, match=words) as raised:
        launch(*arguments, **{**QUIET, **options})
    assert "\n" not in str(raised.value)


def generates(rank, world_size):
    yield rank


def test_a_generator_is_refused():
    with pytest.raises(TypeError, match="generates is a generator"):
        launch(generates, **QUIET)


@pytest.mark.parametrize("timeout", [None, float("inf"), 1e300, np.int64(9)])
def test_every_sensible_timeout_is_taken(timeout):
    assert launch(total, timeout=timeout, **QUIET).outcome == "finished"


# ---- what goes wrong in a rank ------------------------------------------------------------------------------------


def breaks(rank, world_size, how):
    dist.init_process_group("gloo")
    if rank == 1:
        if how == "raise":
            raise ValueError("bad labels")
        if how == "exit":
            sys.exit(0)
        if how == "interrupt":
            raise KeyboardInterrupt
        if how == "os._exit":
            os._exit(0)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "sleep":
            time.sleep(1000)
        if how == "return":
            return "early"
        if how == "broadcast":
            dist.broadcast(torch.ones(1), 0)
            return None
        if how == "unpicklable":
            return (i for i in range(3))
    dist.all_reduce(torch.ones(1))
    time.sleep(0.2 if how == "unpicklable" else 0)
    return "late"


@pytest.mark.parametrize(
    ("how", "kind", "words"),
    [
        ("raise", "error", "Rank 1 failed at .*test_launcher.py, line .* in breaks with ValueError: bad labels"),
        ("exit", "exit", r"Rank 1 left with sys\.exit\(0\)"),
        ("interrupt", "error", "Rank 1 failed at .* with KeyboardInterrupt"),
        ("os._exit", "death", "Rank 1 ended with exit code 0 and said nothing"),
        ("kill", "death", "Rank 1 died of SIGKILL"),
        ("return", "mismatch", "because rank 1 had already returned"),
        ("unpicklable", "result", "rank 1 finished, but its result is a generator"),
    ],
)
def test_the_rank_that_failed_first_is_named_with_the_reason_soon(how, kind, words):
    started = time.monotonic()
    with pytest.raises(RankError, match=words) as raised:
        launch(breaks, how, **QUIET)
    assert (raised.value.rank, raised.value.kind) == (1, kind)
    assert time.monotonic() - started < 4  # under a second here; a loaded machine takes longer to start
    assert raised.value.run.exit_codes[1] is not None


def test_a_hang_ends_after_the_timeout_and_says_where_each_rank_is():
    words = r"Rank 0 waited 1 s in all_reduce at .* for rank 1, which was at .*, line \d+, in breaks"
    started = time.monotonic()
    with pytest.raises(RankError, match=words) as raised:
        launch(breaks, "sleep", timeout=1, **QUIET)
    assert raised.value.kind == "hang"
    assert time.monotonic() - started < 6
    assert any("time.sleep(1000)" in line for line in raised.value.details)


def test_different_collectives_are_told_without_waiting_for_the_timeout():
    words = (
        r"Rank 1 called broadcast from rank 0 of \(1,\) float32 at .* where rank 0 called all_reduce of \(1,\) float32"
    )
    started = time.monotonic()
    with pytest.raises(RankError, match=words) as raised:
        launch(breaks, "broadcast", timeout=60, **QUIET)
    assert (raised.value.kind, raised.value.rank) == ("mismatch", 1)
    assert time.monotonic() - started < 8


def backward_alone(rank, world_size):
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(2, 1))
    if rank == 0:
        model(torch.ones(1, 2)).sum().backward()
    time.sleep(1000)


def test_a_hang_in_ddps_own_collectives_is_noticed_too():
    with pytest.raises(RankError, match="Rank 0 waited 1 s in backward, where DDP averages gradients at") as raised:
        launch(backward_alone, timeout=1, **QUIET)
    assert raised.value.rank == 1


def test_a_long_run_is_no_hang():
    assert launch(sleeps, 1.5, timeout=1, **QUIET).outcome == "finished"


def partial_results(rank, world_size):
    ddp_lab.log(loss=1.0)
    print("seen")
    if rank == 1:
        time.sleep(0.3)
        raise ValueError
    return "kept"


def test_nothing_is_lost_when_a_rank_fails(capsys):
    with pytest.raises(RankError) as raised:
        launch(partial_results, **QUIET)
    run = raised.value.run
    assert run.results == ["kept", None]
    assert run.log.series("loss", 1) == ([0], [1.0])
    assert capsys.readouterr().out == "[rank 0] seen\n[rank 1] seen\n"
    assert repr(run) == "Run(2 ranks, failed on rank 1)"


def cleans_up_with_a_barrier(rank, world_size):
    dist.init_process_group("gloo", timeout=timedelta(seconds=1))
    try:
        if rank == 1:
            raise ValueError("the real error")
        dist.all_reduce(torch.ones(1))
    finally:
        dist.barrier()


def test_the_real_error_is_told_although_cleaning_up_failed_too():
    with pytest.raises(RankError, match=r"Rank 1 failed at .* with ValueError: the real error") as raised:
        launch(cleans_up_with_a_barrier, **QUIET)
    assert raised.value.rank == 1


def wraps(rank, world_size):
    dist.init_process_group("gloo")
    if rank == 1:
        os._exit(3)
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError as error:
        raise ValueError("no gradients") from error


def test_a_victim_that_wraps_its_error_is_not_blamed():
    with pytest.raises(RankError, match="Rank 1 ended with exit code 3"):
        launch(wraps, **QUIET)


def different_shapes(rank, world_size):
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1 + 2 * rank))
    dist.barrier()


def test_different_shapes_end_in_a_sentence():
    with pytest.raises(RankError) as raised:
        launch(different_shapes, timeout=2, **QUIET)
    assert raised.value.kind in ("death", "hang", "error", "mismatch")


def closes_everything(rank, world_size):
    sys.stdout.close()
    sys.stderr = None
    return rank


def exits_with(rank, world_size, code):
    sys.exit(code)


def test_a_rank_ends_well_whatever_it_did_to_its_output():
    run = launch(closes_everything, **QUIET)
    assert (run.results, run.exit_codes) == ([0, 1], [0, 0])


@pytest.mark.parametrize(("code", "exit_code"), [(0, 0), (3, 3), (2**40 + 5, 5), ("text", 1), (None, 1)])
def test_every_way_to_leave_is_told_as_such(code, exit_code):
    with pytest.raises(RankError, match=r"Rank 0 left with sys\.exit\(") as raised:
        launch(exits_with, code, world_size=1, **QUIET)
    assert raised.value.run.exit_codes == [exit_code]


def logs_anything(rank, world_size):
    ddp_lab.log(loss=1.0)
    ddp_lab.log(hook=lambda: 1, lock=threading.Lock())


def test_logging_what_cannot_travel_costs_nothing():
    run = launch(logs_anything, **QUIET)
    assert run.log.series("loss", 1) == ([0], [1.0])
    assert "lambda" in run.log.series("hook", 0)[1][0]


# ---- process groups -----------------------------------------------------------------------------------------------


def as_in_the_tutorial(rank, world_size):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = "12355"
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    ones = torch.ones(1)
    dist.all_reduce(ones)
    dist.destroy_process_group()
    return ones.item()


def test_the_tutorials_own_address_works_and_opens_no_port_of_that_number():
    assert launch(as_in_the_tutorial, **QUIET).results == [2, 2]


def at_an_address(address, rank, world_size):
    """Join where the address says, and leave without destroying the group, as many scripts do."""
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world_size)
    ones = torch.ones(1)
    dist.all_reduce(ones)
    return ones.item()


def at_a_host_without_address(rank, world_size):
    os.environ["MASTER_ADDR"] = "no-such-host.invalid"
    del os.environ["MASTER_PORT"]
    return at_an_address("tcp://no-such-host.invalid:1", rank, world_size)


def at_a_file(rank, world_size, path):
    return at_an_address(f"file://{path}", rank, world_size)


def test_a_host_that_does_not_resolve_and_a_file_of_an_earlier_run_do_no_harm(tmp_path):
    (tmp_path / "rendezvous").write_bytes(b"\0left over\xff")
    run = launch(at_a_host_without_address, **QUIET)
    assert (run.results, run.output(0)) == ([2, 2], "")
    assert launch(at_a_file, tmp_path / "rendezvous", **QUIET).results == [2, 2]


def test_a_proxy_that_is_not_there_does_no_harm(monkeypatch):
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
        monkeypatch.setenv(name.upper(), "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert launch(total, 1, **QUIET).results[0].item() == 3


def again_and_again(rank, world_size):
    sums = []
    for number in range(4):
        dist.init_process_group("gloo")
        tensor = torch.tensor([float(number)])
        dist.all_reduce(tensor)
        sums.append(tensor.item())
        dist.destroy_process_group()
    return sums


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_group_can_be_made_destroyed_and_made_again(world_size):
    expected = [world_size * number for number in range(4)]
    assert launch(again_and_again, world_size=world_size, timeout=10, **QUIET).results == [expected] * world_size


# ---- output and results -------------------------------------------------------------------------------------------


def prints(rank, world_size, how):
    if how == "descriptors":
        os.write(1, b"to 1\n")
        os.write(2, b"to 2\n")
    elif how == "c":  # as from C++, whose cout is C's stdout
        ctypes.CDLL(None).printf(b"no newline")
    elif how == "bytes":
        os.write(1, b"\xff\xfe ok\n")
    elif how == "bar":
        for step in range(50):
            print(f"\r{step} %", end="", flush=True)
        print()
    elif how == "one line of 100 MB":
        print("x" * 100_000_000)
        print("last words")
    elif how == "lines of 100 MB":
        for _ in range(1000):
            sys.stdout.write(("x" * 99 + "\n") * 1000)
        print("last words")


@pytest.mark.parametrize(
    ("how", "text"),
    [("descriptors", "to 1\nto 2\n"), ("c", "no newline"), ("bytes", "\\xff\\xfe ok\n"), ("bar", "49 %\n")],
)
def test_output_of_every_kind_is_kept(how, text):
    assert launch(prints, how, world_size=1, **QUIET).output(0) == text


@pytest.mark.parametrize("how", ["one line of 100 MB", "lines of 100 MB"])
def test_very_much_output_keeps_its_beginning_and_its_end(how):
    run = launch(prints, how, world_size=1, **QUIET)
    assert len(run.output(0)) < 2**20
    assert run.output(0).startswith("xxxxx")
    assert "bytes left out" in run.output(0) and run.output(0).endswith("last words\n")


def returns_model(rank, world_size):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(2, 1))
    loss = model(torch.ones(1, 2)).sum()
    return {"model": model, "loss": loss}


def test_models_and_losses_come_back_usable():
    run = launch(returns_model, **QUIET)
    assert type(run.results[0]["model"]) is torch.nn.Linear
    assert not run.results[1]["loss"].requires_grad
    assert torch.equal(run.results[0]["model"].weight, run.results[1]["model"].weight)


def a_class_of_the_notebook():
    namespace = {"__name__": "__main__"}
    exec("class Box:\n    size = 1\n    def grown(self):\n        return type(self).size + 1", namespace)
    return namespace["Box"]


def returns_box(rank, world_size, box_class):
    box_class.size = 100
    return box_class()


def test_an_object_of_the_notebooks_class_comes_back_as_one_and_leaves_the_class_alone():
    box_class = a_class_of_the_notebook()
    grown = box_class.grown
    boxes = launch(returns_box, box_class, **QUIET).results
    assert [type(box) is box_class for box in boxes] == [True, True]
    assert (box_class.size, box_class.grown) == (1, grown)


def prints_when_it_has_returned(rank, world_size, path):
    def goes_on():
        time.sleep(0.3)
        path.write_text("whole")  # such as a checkpoint
        print("last words")

    threading.Thread(target=goes_on).start()
    return "returned"


def test_a_rank_ends_when_its_threads_have_ended_too(tmp_path):
    run = launch(prints_when_it_has_returned, tmp_path / "written", world_size=1, **QUIET)
    assert (run.results, run.output(0)) == (["returned"], "last words\n")
    assert (tmp_path / "written").read_text() == "whole"


def sleeps_on():
    time.sleep(1000)


def goes_on_for_ever(rank, world_size, daemon):
    threading.Thread(target=sleeps_on, daemon=daemon).start()


def test_a_thread_that_never_ends_is_told_when_stop_is_pressed():
    assert launch(goes_on_for_ever, True, **QUIET).outcome == "finished"
    with pytest.raises(KeyboardInterrupt) as raised:
        launch(goes_on_for_ever, False, on_event=InterruptWhen(2, 0.5))
    details = "\n".join(raised.value.details)
    assert details.count("ended by the lab, when a thread of its own was here") == 2
    assert details.count("in sleeps_on\n    time.sleep(1000)") == 2


GIB = 2**30


def returns_bytes(rank, world_size, size):
    return torch.zeros(size, dtype=torch.uint8)


def test_a_result_of_a_gigabyte_is_refused_in_one_sentence():
    with pytest.raises(RankError, match="at most 1 GiB can come back") as raised:
        launch(returns_bytes, GIB + 1, world_size=1, **QUIET)
    assert (raised.value.kind, raised.value.rank) == ("result", 0)


class Fragile(Exception):
    def __init__(self, one, two):
        super().__init__(one)


def returns_fragile(rank, world_size):
    return Fragile(1, 2) if rank else "kept"


def test_a_result_that_cannot_be_rebuilt_costs_no_other_result():
    with pytest.raises(RankError, match="rank 1 finished, but its result can't be rebuilt") as raised:
        launch(returns_fragile, **QUIET)
    assert raised.value.run.results == ["kept", None]


class ClosesBadly(Display):
    def close(self, run):
        raise LookupError("mine")


def test_a_display_that_cannot_be_closed_costs_no_result():
    with pytest.warns(UserWarning, match="LookupError: mine"):
        assert launch(sleeps, 0, on_event=ClosesBadly()).outcome == "finished"


def test_output_reaches_a_terminal_that_knows_few_characters(monkeypatch):
    ascii_only = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", ascii_only)
    launch(says, "café", world_size=1, **QUIET)
    ascii_only.flush()
    assert ascii_only.buffer.getvalue() == b"[rank 0] caf\\xe9\n"


def says(rank, world_size, text):
    print(text)


def changes(rank, world_size, tensor):
    tensor += 1


def test_the_notebooks_own_tensors_stay_as_they_were():
    tensor = torch.zeros(3)
    launch(changes, tensor, **QUIET)
    assert tensor.tolist() == [0, 0, 0]


# ---- stopping -----------------------------------------------------------------------------------------------------


class InterruptWhen:
    """Press Stop as a learner does, once every rank says that it runs (and a moment later)."""

    def __init__(self, ranks, delay):
        self.left, self.delay = ranks, delay

    def __call__(self, event):
        self.left -= event.kind == "running"
        if not self.left and event.kind == "running":
            threading.Timer(self.delay, os.kill, (os.getpid(), signal.SIGINT)).start()


@pytest.mark.parametrize("how", ["sleep", "backward"])
def test_stop_ends_ranks_that_are_blocked(how):
    function, args = (backward_alone, ()) if how == "backward" else (breaks, ("sleep",))
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt, match="stopped by you; all 2 ranks have ended") as raised:
        launch(function, *args, on_event=InterruptWhen(2, 1.0))
    assert time.monotonic() - started < 5
    assert isinstance(raised.value, ddp_lab.Interrupted)
    assert raised.value.run.outcome == "interrupted"
    assert any("Rank 0" in line for line in raised.value.details)
    assert launch(total, **QUIET).results[0].item() == 1  # the next launch is fine


def ignores_sigterm(rank, world_size):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(1000)


def test_stop_ends_ranks_that_ignore_it():
    with pytest.raises(KeyboardInterrupt):
        launch(ignores_sigterm, on_event=InterruptWhen(2, 0.5))


class Pairs(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return index


def loads(rank, world_size):
    loader = DataLoader(Pairs(), num_workers=2, persistent_workers=True)
    batches = iter(loader)
    next(batches)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1000)


def test_loader_workers_end_with_their_rank():
    with pytest.raises(RankError, match="SIGKILL"):
        launch(loads, **QUIET)


# ---- launches beside each other -----------------------------------------------------------------------------------


def test_two_launches_at_once_from_threads_do_not_disturb_each_other():
    found = {}
    threads = [
        threading.Thread(target=lambda offset=offset: found.update({offset: launch(total, offset, **QUIET).results}))
        for offset in (10, 20)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {offset: [r.item() for r in results] for offset, results in found.items()} == {10: [21, 21], 20: [41, 41]}


def launches(rank, world_size):
    return launch(total, rank, **QUIET).results


def test_a_rank_may_launch_ranks_of_its_own():
    assert [[r.item() for r in results] for results in launch(launches, **QUIET).results] == [[1, 1], [3, 3]]


def test_launch_works_inside_asyncio_and_beside_it():
    async def main():
        one = launch(total, 1, **QUIET)  # as in a cell: Jupyter runs it inside its own loop
        others = await asyncio.gather(*(asyncio.to_thread(launch, total, n, **QUIET) for n in (2, 3)))
        return [run.results[0].item() for run in (one, *others)]

    assert asyncio.run(main()) == [3, 5, 7]


def test_more_ranks_than_cores_take_turns():
    world_size = os.cpu_count() + 3
    assert launch(total, world_size=world_size, **QUIET).results[0].item() == sum(range(world_size))


def listens(rank, world_size):
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    inet = [c for pid in (os.getpid(), os.environ["KERNEL"]) for c in psutil.Process(int(pid)).net_connections("inet")]
    dist.barrier()
    return sorted({c.laddr.ip for c in inet if c.status == psutil.CONN_LISTEN})


def test_nothing_listens_beyond_loopback(monkeypatch):
    monkeypatch.setenv("KERNEL", str(os.getpid()))
    assert launch(listens, **QUIET).results == [["127.0.0.1"]] * 2
