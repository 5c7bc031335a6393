"""Which backend and which device a rank uses, and why."""

import torch
import torch.distributed as dist


def choose_backend(world_size: int, requested: str = "auto") -> tuple[str, str]:
    """Return (backend, reason): NCCL where there is one GPU per rank, else gloo on the CPU.

    Raises ValueError, naming what this machine lacks and the cure, when `requested` can't work here.
    Source: https://docs.pytorch.org/docs/stable/distributed.html#which-backend-to-use
    """
    gpus = torch.cuda.device_count()
    have = f"this machine has {_count(gpus, 'GPU')} for {_count(world_size, 'rank')}"
    nccl = dist.is_nccl_available()
    if requested == "auto":
        if nccl and gpus >= world_size:
            return "nccl", have
        return "gloo", have if nccl or not gpus else f"{have}, but this PyTorch was built without NCCL"
    if requested not in ("gloo", "nccl"):
        raise ValueError(f"backend={requested!r} is not one that the lab knows: use 'auto', 'gloo' or 'nccl'")
    if requested == "nccl" and not nccl:
        raise ValueError("backend='nccl' needs a PyTorch built with NCCL, and this one is not: use backend='gloo'")
    if requested == "nccl" and gpus < world_size:
        raise ValueError(f"backend='nccl' needs one GPU per rank, and {have}: use backend='gloo' or fewer ranks")
    if requested == "gloo" and not dist.is_gloo_available():
        raise ValueError("backend='gloo' needs a PyTorch built with gloo, and this one is not: install it again")
    return requested, "as requested"


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"


def device_for(local_rank: int, backend: str) -> torch.device:
    """Return this rank's device: its own GPU under NCCL, else the CPU."""
    return torch.device("cuda", local_rank) if backend == "nccl" else torch.device("cpu")
