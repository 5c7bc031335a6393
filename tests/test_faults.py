"""The fault table: what learners break, with real ranks, and the verdict that each fault must get.

Each row is one fault. It runs with two and with three ranks; the rank named is the one that failed first, the verdict
comes soon, no process is left, and the next launch is fine (`_fast_and_clean` sees to both).
"""

import ctypes
import os
import resource
import signal
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from ddp_lab import RankError, launch
from ddp_lab.mismatch import SAME_CALLS, SAME_GROUPS, SAME_STEPS, SAME_TENSORS, SEND_FIRST, WHOLE_MODEL

QUIET = {"on_event": None}
HANG_SECONDS = 1.0  # launch's timeout where a hang is to be found
ROWS = []


@pytest.fixture(autouse=True)
def _fast_and_clean(fast, nothing_left):
    yield
    assert launch(adds, **QUIET).results == [2.0, 2.0]


def row(kind, rank, words, cure="", within=2.0, timeout=30):
    """Enter a function of ranks in the table. words, cure: in the verdict; within: seconds until it must be there."""

    def enter(function):
        ROWS.append(pytest.param(function, kind, rank, words, cure, within, timeout, id=function.__name__))
        return function

    return enter


def hang(rank, words, cure="", kind="hang"):
    return row(kind, rank, words, cure, within=HANG_SECONDS + 2.0, timeout=HANG_SECONDS)


def adds(rank, world_size, shape=1, dtype=torch.float32):
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    tensor = torch.ones(shape, dtype=dtype)
    dist.all_reduce(tensor)
    return tensor.sum().item()


def model(norm=False):
    parts = [torch.nn.Linear(4, 4)] + [torch.nn.BatchNorm1d(4)] * norm
    return DistributedDataParallel(torch.nn.Sequential(*parts))


def step(wrapped):
    wrapped(torch.ones(2, 4)).sum().backward()


# ---- errors -------------------------------------------------------------------------------------------------------


@row("error", 1, r"Rank 1 failed at tests/test_faults.py, line \d+, in before_a_collective with ValueError: bad labels")
def before_a_collective(rank, world_size):
    dist.init_process_group("gloo")
    if rank == 1:
        raise ValueError("bad labels")
    adds(rank, world_size)


@row("error", 1, "Rank 1 failed at .*, in inside_a_collective with TypeError: Invalid function argument")
def inside_a_collective(rank, world_size):
    adds(rank, world_size)
    dist.all_reduce("no tensor" if rank == 1 else torch.ones(1))


@row("error", 1, "Rank 1 failed at .*, in after_a_collective with KeyError: 'x'")
def after_a_collective(rank, world_size):
    adds(rank, world_size)
    if rank == 1:
        _ = {}["x"]
    adds(rank, world_size)


@row("error", None, r"Rank \d failed at .*, in on_all_ranks with ValueError: everywhere")
def on_all_ranks(rank, world_size):
    adds(rank, world_size)
    raise ValueError("everywhere")


@hang(1, "A thread of rank 1 failed at .*, in refuses with ValueError: in a thread", kind="error")
def in_a_thread_that_others_wait_for(rank, world_size):
    def refuses():
        raise ValueError("in a thread")

    dist.init_process_group("gloo")
    if rank == 1:
        thread = threading.Thread(target=refuses)
        thread.start()
        thread.join()
        time.sleep(1000)
    adds(rank, world_size)


class Images(Dataset):
    def __init__(self, how):
        self.how = how

    def __len__(self):
        return 4

    def __getitem__(self, index):
        if self.how == "raise":
            raise KeyError("no such image")
        os.kill(os.getpid(), signal.SIGKILL)


@row("error", 1, r"Rank 1 failed at .* with KeyError: 'no such image' \(in DataLoader worker process 0\)")
def in_a_loader_worker(rank, world_size):
    dist.init_process_group("gloo")
    if rank == 1:
        next(iter(DataLoader(Images("raise"), num_workers=1)))
    adds(rank, world_size)


@row("error", 1, "DataLoader worker .* exited unexpectedly", "num_workers=0")
def a_loader_worker_is_killed(rank, world_size):
    dist.init_process_group("gloo")
    if rank == 1:
        next(iter(DataLoader(Images("kill"), num_workers=1)))
    adds(rank, world_size)


@row("error", None, "parameters that were not used|finished reduction", "find_unused_parameters=True")
def unused_parameters(rank, world_size):
    class Half(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = torch.nn.Linear(4, 1), torch.nn.Linear(4, 1)

        def forward(self, images):
            return self.used(images)

    dist.init_process_group("gloo")
    wrapped = DistributedDataParallel(Half())
    for _ in range(2):
        step(wrapped)


# ---- resources ------------------------------------------------------------------------------------------------------


@row("error", 1, "Too many open files", "ulimit -n")
def descriptors_used_up(rank, world_size):
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    dist.init_process_group("gloo")
    opened = []
    while rank == 1:
        opened.append(os.open(os.devnull, os.O_RDONLY))
    adds(rank, world_size)


@row("error", 0, "Rank 0 failed at .*, in disk_full with RuntimeError", "free some space")
def disk_full(rank, world_size):
    dist.init_process_group("gloo")
    if rank == 0:
        torch.save(torch.zeros(100_000), "/dev/full")
    adds(rank, world_size)


@row("error", 1, "can't allocate memory", "fewer ranks")
def memory_used_up(rank, world_size):
    dist.init_process_group("gloo")
    adds(rank, world_size, shape=1 << 50 if rank == 1 else 1)


@row("error", None, "EOFError", "pass the answer")
def asks_at_the_keyboard(rank, world_size):
    input("Which learning rate? ")


# ---- ways to leave ------------------------------------------------------------------------------------------------


@row("exit", 1, r"Rank 1 left with sys\.exit\(0\) at .*, in exits_well before its function returned", "return")
def exits_well(rank, world_size):
    dist.init_process_group("gloo")
    if rank == 1:
        sys.exit(0)
    adds(rank, world_size)


@row("exit", 1, r"Rank 1 left with sys\.exit\(1\) at .*, in exits_badly", "return")
def exits_badly(rank, world_size):
    dist.init_process_group("gloo")
    if rank == 1:
        sys.exit(1)
    adds(rank, world_size)


@row("death", 1, "Rank 1 ended with exit code 7 and said nothing", "return")
def leaves_at_once(rank, world_size):
    dist.init_process_group("gloo")
    if rank == 1:
        os._exit(7)
    adds(rank, world_size)


@row("error", 1, "Rank 1 failed at .*, in interrupts_itself with KeyboardInterrupt", "let the function return")
def interrupts_itself(rank, world_size):
    dist.init_process_group("gloo")
    if rank == 1:
        raise KeyboardInterrupt
    adds(rank, world_size)


@row("death", 1, "Rank 1 died of SIGKILL, .* because memory ran out", "fewer ranks, a smaller batch")
def is_killed(rank, world_size):
    dist.init_process_group("gloo")
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    adds(rank, world_size)


@row("death", 1, "Rank 1 died of SIGSEGV at .*, in crashes, a crash in compiled code", "what that line passes")
def crashes(rank, world_size):
    dist.init_process_group("gloo")
    if rank == 1:
        ctypes.string_at(0)
    adds(rank, world_size)


@row("death", 1, "Rank 1 died of SIGABRT at .*, in gives_up, compiled code gave up", "last printed lines")
def gives_up(rank, world_size):
    dist.init_process_group("gloo")
    if rank == 1:
        os.abort()
    adds(rank, world_size)


# ---- hangs --------------------------------------------------------------------------------------------------------


@hang(1, "Rank 0 waited 1 s in all_reduce at .* for rank 1, which was at .*, in sleeps", "reach the same call")
def sleeps(rank, world_size):
    dist.init_process_group("gloo")
    if rank == 1:
        time.sleep(1000)
    adds(rank, world_size)


@hang(1, "Rank 0 waited 1 s in all_reduce at .* for rank 1, which was at .*, in loops", "reach the same call")
def loops(rank, world_size):
    dist.init_process_group("gloo")
    while rank == 1:
        pass
    adds(rank, world_size)


@hang(None, "waited 1 s in all_reduce at .*, while rank 1 was in all_reduce of another process group at", SAME_GROUPS)
def deadlocks_in_two_groups(rank, world_size):
    dist.init_process_group("gloo")
    groups = [dist.new_group(), dist.new_group()]
    for group in groups if rank == 0 else reversed(groups):
        dist.all_reduce(torch.ones(1), group=group)


@hang(None, r"Rank \d waited 1 s in recv at .*, while rank \d was in recv at", SEND_FIRST)
def receives_before_it_sends(rank, world_size):
    dist.init_process_group("gloo")
    dist.recv(torch.ones(1), (rank + 1) % world_size)
    dist.send(torch.ones(1), (rank - 1) % world_size)


@hang(1, "Rank 0 waited 1 s in init_process_group at .* for rank 1, which was at .*, in never_joins", "every rank")
def never_joins(rank, world_size):
    if rank == 1:
        time.sleep(1000)
    adds(rank, world_size)


@hang(1, "waited 1 s in init_process_group at .* for rank 1, which had already returned", "call init_process_group")
def returns_before_it_joins(rank, world_size):
    return rank == 1 or adds(rank, world_size)


@hang(1, "Rank 0 waited 1 s in monitored_barrier at .* for rank 1, which was at .*, in misses_the_barrier")
def misses_the_barrier(rank, world_size):
    dist.init_process_group("gloo")
    if rank == 1:
        time.sleep(1000)
    dist.monitored_barrier()


# ---- mismatches ---------------------------------------------------------------------------------------------------


@row("mismatch", 1, "Rank 1 called barrier at .* where rank 0 called all_reduce of .2,.", SAME_CALLS, within=3)
def different_collectives(rank, world_size):
    adds(rank, world_size)
    if rank == 1:
        dist.barrier()
    adds(rank, world_size, 2)


@row("mismatch", 1, r"all_reduce of \(900,\) float32 at .* where rank 0 called all_reduce of \(300,\)", SAME_TENSORS, 3)
def different_shapes(rank, world_size):
    adds(rank, world_size)
    adds(rank, world_size, 900 if rank == 1 else 300)


@row(
    "mismatch", 1, r"all_reduce of \(4,\) float64 at .* where rank 0 called all_reduce of \(4,\) float32", SAME_TENSORS
)
def different_dtypes(rank, world_size):
    adds(rank, world_size, 4, torch.float64 if rank == 1 else torch.float32)


@row("mismatch", 1, r"all_reduce of \(4,\) int32 at .* where rank 0 called all_reduce of \(4,\) float32", SAME_TENSORS)
def different_dtypes_of_one_size_which_no_backend_notices(rank, world_size):
    return adds(rank, world_size, 4, torch.int32 if rank == 1 else torch.float32)


@row("mismatch", None, r"already returned without that call \(calls of that line so far: rank 0: 3, rank 1: 4")
def different_counts(rank, world_size):
    for _ in range(4 if rank == 1 else 3):
        adds(rank, world_size)


@row("mismatch", 1, "Rank 1 called all_reduce of .* where rank 0 called barrier at .*, in skips_one", SAME_CALLS, 3)
def skips_one(rank, world_size):
    dist.init_process_group("gloo")
    if rank != 1:
        dist.barrier()
    adds(rank, world_size, 2)


@row("mismatch", 1, "Rank 1 called broadcast from rank 1 of .* where rank 0 called broadcast from rank 0", within=3)
def different_sources(rank, world_size):
    dist.init_process_group("gloo")
    dist.broadcast(torch.ones(1), 1 if rank == 1 else 0)
    dist.barrier()


@row("mismatch", None, r"\(backward passes so far: rank 0: 3, rank 1: 4", SAME_STEPS)
def uneven_batches(rank, world_size):
    dist.init_process_group("gloo")
    wrapped = model()
    for _ in range(4 if rank == 1 else 3):
        step(wrapped)


@row("mismatch", 1, r"\(backward passes so far: rank 0: 3, rank 1: 4", SAME_STEPS, within=3)
def uneven_batches_before_a_metric(rank, world_size):
    uneven_batches(rank, world_size)
    adds(rank, world_size, 2)


@row("mismatch", 0, r"Rank 0 called the DDP wrapper \(broadcast .*\) at .* where rank 1 called barrier", WHOLE_MODEL, 3)
def evaluates_on_rank_0_through_the_wrapper(rank, world_size):
    dist.init_process_group("gloo")
    wrapped = model(norm=True)
    step(wrapped)
    if rank == 0:
        wrapped.eval()
        with torch.no_grad():
            for _ in range(3):
                wrapped(torch.ones(2, 4))
    dist.barrier()


@row("mismatch", 1, r"\(backward passes so far: rank 0: 4, rank 1: 3", SAME_STEPS, within=3)
def stops_early_alone(rank, world_size):
    dist.init_process_group("gloo")
    wrapped = model()
    for epoch in range(5):
        step(wrapped)
        if rank == 1 and epoch == 2:
            break
    dist.barrier()


@row("error", None, "params.* appears not to match sizes", "same model on every rank")
def different_models(rank, world_size):
    dist.init_process_group("gloo")
    DistributedDataParallel(torch.nn.Linear(4, 4 + (rank == 1)))


# ---- rendezvous ---------------------------------------------------------------------------------------------------


@row("error", None, "initialize the default process group twice", "destroy_process_group")
def joins_twice(rank, world_size):
    for _ in range(2):
        dist.init_process_group("gloo")


@row("error", 1, "Rank 1 failed at .* two processes called init_process_group with rank=0", "leave out rank", within=3)
def takes_another_ranks_place(rank, world_size):
    dist.init_process_group("gloo", rank=0 if rank == 1 else rank, world_size=world_size)


@row("error", None, r"init_process_group waits for \d ranks, and \d ranks are too few", "leave out rank")
def waits_for_too_many(rank, world_size):
    dist.init_process_group("gloo", rank=rank, world_size=world_size + 1)


@row("error", None, "Default process group has not been initialized", "init_process_group")
def never_initialises(rank, world_size):
    dist.all_reduce(torch.ones(1))


@row("error", None, "Unable to find address for: nope0", "unset GLOO_SOCKET_IFNAME")
def names_an_interface_that_is_not_there(rank, world_size):
    os.environ["GLOO_SOCKET_IFNAME"] = "nope0"
    adds(rank, world_size)


@row("error", None, "invalid root rank: 9", "from 0 to world_size - 1")
def broadcasts_from_nowhere(rank, world_size):
    dist.init_process_group("gloo")
    dist.broadcast(torch.ones(1), 9)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(("function", "kind", "rank", "words", "cure", "within", "timeout"), ROWS)
def test_each_fault_gets_its_verdict_soon(function, kind, rank, words, cure, within, timeout, world_size):
    started = time.monotonic()
    with pytest.raises(RankError, match=words) as raised:
        launch(function, world_size=world_size, timeout=timeout, **QUIET)
    took = time.monotonic() - started
    assert raised.value.kind == kind
    assert rank is None or raised.value.rank == rank
    assert cure in raised.value.cure
    assert took < within + 1.0  # which a start takes on a busy machine
    assert "\n" not in raised.value.why and len(raised.value.details) >= world_size
    assert None not in raised.value.run.exit_codes
