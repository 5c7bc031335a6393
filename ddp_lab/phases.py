"""Work that only rank 0 does, while the others wait without being taken for a hang."""

import contextlib
from collections.abc import Iterator
from datetime import timedelta

import torch.distributed as dist

PHASE = "rank0_phase "  # begins the description of its process group, by which a verdict knows it


@contextlib.contextmanager
def rank0_phase(name: str, timeout: float = 1800.0) -> Iterator[bool]:
    """Let rank 0 work alone; the other ranks wait at the end of the block. All ranks must enter it.

        with ddp_lab.rank0_phase("evaluation") as mine:
            if mine:
                evaluate(raw_model)

    Yields True on rank 0, False on the others. timeout: seconds that the others wait, instead of the shorter timeout
    of `launch` and `init_process_group`, which is there to find hangs of training steps soon. Works under `torchrun`
    and with every backend, because the waiting is done by a gloo group of its own.
    Raises RuntimeError on the ranks that waited too long.
    Source: https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.new_group
    """
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout), group_desc=PHASE + name)
    try:
        yield dist.get_rank() == 0
        dist.barrier(group)
    finally:
        dist.destroy_process_group(group)
