"""What tracing records of real ranks' calls, DDP's own included."""

import time

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddp_lab import launch, tracing
from ddp_lab.tracing import GRADIENTS, WRAPPER

QUIET = {"on_event": None}


@pytest.fixture(autouse=True)
def _fast_and_clean(fast, nothing_left):
    yield


def calls_many(rank, world_size):
    dist.init_process_group("gloo")
    for _ in range(2):
        dist.all_reduce(torch.ones(2, 3))
    dist.broadcast(torch.ones(4, dtype=torch.int64), src=1)
    dist.all_gather_object([None] * world_size, {"rank": 1})
    if rank == 0:
        dist.send(torch.ones(1), 1)
    elif rank == 1:
        dist.recv(torch.ones(1), 0)
    pair = dist.new_group([0, world_size - 1])
    if rank in (0, world_size - 1):
        dist.all_reduce(torch.ones(1), group=pair)
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo")
    dist.barrier()


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_call_is_recorded_by_rank_in_order(world_size):
    run = launch(calls_many, world_size=world_size, **QUIET)
    assert run.trace == sorted(run.trace, key=lambda call: (call.rank, call.number))
    mine = [call for call in run.trace if call.rank == 0]
    assert [call.number for call in mine] == list(range(1, len(mine) + 1))
    assert [(call.name, call.group, call.seq) for call in mine] == [
        ("all_reduce", "0", 1),
        ("all_reduce", "0", 2),
        ("broadcast", "0", 3),
        ("all_gather_object", "0", 4),
        ("all_gather_object", "0", 5),
        ("send", "0", 0),
        ("all_reduce", "1", 1),
        ("barrier", "0", 6),
        ("barrier", "0 made again (2)", 1),
    ]
    first, second, third = mine[:3]
    assert (first.shape, first.elements, first.dtype, first.root, first.nth) == ((2, 3), 6, "float32", -1, 1)
    assert (second.nth, third.dtype, third.root) == (2, "int64", 1)
    assert mine[6].ranks == (0, world_size - 1) and first.ranks == ()
    assert first.place[2:] == ("calls_many", "dist.all_reduce(torch.ones(2, 3))")


def test_calls_have_a_beginning_and_an_end():
    before = time.time()
    run = launch(late, **QUIET)
    early, waited = sorted((call for call in run.trace if call.nth == 2), key=lambda call: call.end - call.start)
    assert before < early.start < early.end < time.time()
    assert waited.rank == 0 and 0.25 < waited.end - waited.start < 2  # for rank 1, which slept
    assert not any(call.failed for call in run.trace)


def late(rank, world_size):
    dist.init_process_group("gloo")
    for _ in range(2):
        time.sleep(0.3 * rank)
        dist.all_reduce(torch.ones(1))


def trains(rank, world_size):
    dist.init_process_group("gloo")
    torch.manual_seed(rank)
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.BatchNorm1d(2)))
    for _ in range(3):
        model(torch.ones(3, 4)).sum().backward()


def test_ddps_own_calls_are_recorded_with_the_learners_line():
    trace = launch(trains, **QUIET).trace
    gradients = [call for call in trace if call.rank == 0 and call.within == GRADIENTS]
    assert [call.nth for call in gradients] == [1, 2, 3]
    assert {(call.op, call.elements, call.place[3]) for call in gradients} == {
        ("all_reduce", 4 * 2 + 2 + 2 + 2, "model(torch.ones(3, 4)).sum().backward()")
    }
    buffers = [call for call in trace if call.within == WRAPPER and call.place[3] == gradients[0].place[3]]
    assert {call.op for call in buffers} == {"broadcast"}


def many(rank, world_size, times):
    dist.init_process_group("gloo")
    tensor = torch.ones(1)
    for _ in range(times):
        dist.all_reduce(tensor)


def test_of_very_many_calls_the_latest_are_kept():
    trace = launch(many, tracing.KEPT + 500, world_size=1, **QUIET).trace
    assert len(trace) == tracing.KEPT
    assert trace[-1].seq == trace[-1].nth == tracing.KEPT + 500


def breaks_the_record(rank, world_size):
    tracing._caller = None
    dist.init_process_group("gloo")
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    return tensor.item()


def test_a_fault_of_the_record_costs_no_collective():
    run = launch(breaks_the_record, **QUIET)
    assert (run.results, run.trace) == ([2.0, 2.0], [])


class OldGroup:
    """A process group of a PyTorch without hooks."""


def test_a_pytorch_without_hooks_still_makes_groups(monkeypatch):
    monkeypatch.setattr(dist.distributed_c10d, "_new_process_group_helper", lambda *args, **kwargs: (OldGroup(), 7))
    tracing.watch_groups(tracing.Trace(0))
    group, store = dist.distributed_c10d._new_process_group_helper(2, 0, [], "gloo")
    assert type(group) is OldGroup and store == 7
