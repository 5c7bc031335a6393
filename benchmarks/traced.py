"""What recording every collective costs a step: `python benchmarks/traced.py [ROUNDS]`.

Each of two ranks has two replicas of one model, equal but for their process group: one is recorded, as every group in
the lab is, and one is not. They train in turn, in short blocks of steps, and the two blocks of a round are compared.
"""

import contextlib
import statistics
import sys
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from overhead import show
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import ddp_lab
from ddp_lab.models import MODELS

WORLD_SIZE = 2
PER_RANK_BATCH_SIZE = 32
STEPS = {"convnet": 20, "simplenet": 100}  # in a block
WAYS = ("not recorded", "recorded")


@contextlib.contextmanager
def not_recorded() -> Iterator[None]:
    """Make process groups as PyTorch does, without the lab's hooks."""
    watched = dist.distributed_c10d._new_process_group_helper
    dist.distributed_c10d._new_process_group_helper = watched.__wrapped__
    try:
        yield
    finally:
        dist.distributed_c10d._new_process_group_helper = watched


def seconds_of_blocks(rank: int, world_size: int, model: str, rounds: int) -> list[tuple[float, float]]:
    """Return how long one block took, (not recorded, recorded), in each round."""
    dist.init_process_group("gloo")
    with not_recorded():
        groups = [dist.new_group()]
    groups.append(dist.new_group())
    replicas = [DistributedDataParallel(MODELS[model](), process_group=group) for group in groups]
    for replica in replicas:
        block(replica, STEPS[model])
    found = []
    for number in range(rounds):
        seconds = {}
        for way in (0, 1) if number % 2 else (1, 0):
            dist.barrier()
            seconds[way] = block(replicas[way], STEPS[model])
        found.append((seconds[0], seconds[1]))
    dist.destroy_process_group()
    return found


def block(replica: DistributedDataParallel, steps: int) -> float:
    """Train, as `ddp_lab.train` does; return the seconds."""
    images, labels = torch.rand(PER_RANK_BATCH_SIZE, 1, 28, 28), torch.arange(PER_RANK_BATCH_SIZE) % 10
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.01)
    started = time.perf_counter()
    for _ in range(steps):
        optimizer.zero_grad()
        cross_entropy(replica(images), labels).backward()
        optimizer.step()
    return time.perf_counter() - started


def main(rounds: int) -> None:
    for model, steps in STEPS.items():
        by_rank = ddp_lab.launch(seconds_of_blocks, model, rounds, world_size=WORLD_SIZE, on_event=None).results
        slower = [[max(block) for block in zip(*ways, strict=True)] for ways in zip(*by_rank, strict=True)]
        bare, recorded = (1000 * statistics.median(times) / steps for times in zip(*slower, strict=True))
        print(f"{model}, {rounds} rounds of {steps} steps: {bare:.2f} ms a step {WAYS[0]}, {recorded:.2f} ms {WAYS[1]}")
        show("ratio", [recorded / bare for bare, recorded in slower])


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 200)
