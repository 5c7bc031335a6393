"""Train a small network on MNIST with DistributedDataParallel: one function for notebook, terminal and cluster.

    from a cell:            ddp_lab.launch(ddp_lab.train, world_size=2)
    one process:            python -m ddp_lab.train
    two, on one machine:    torchrun --standalone --nproc_per_node=2 -m ddp_lab.train
    on each of two machines, four ranks each:
                            torchrun --nnodes=2 --nproc_per_node=4 --rdzv-backend=c10d --rdzv-endpoint=HOST:29400 \\
                                -m ddp_lab.train

All of them call `train(rank, world_size, …)`. With the same seed and world size, on one kind of machine, they give the
same weights.
Source of the recipe: https://docs.pytorch.org/tutorials/intermediate/ddp_tutorial.html
"""

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from ddp_lab.data import mnist, prepare_data, shard
from ddp_lab.devices import choose_backend, device_for
from ddp_lab.events import log
from ddp_lab.models import MODELS, fingerprint


def train(
    rank: int,
    world_size: int,
    *,
    model: str = "simplenet",
    epochs: int = 5,
    per_rank_batch_size: int = 64,
    lr: float = 0.02,
    seed: int = 0,
    backend: str = "auto",
    data_root: str | os.PathLike | None = None,
    checkpoint: str | os.PathLike | None = None,
) -> dict:
    """Run one rank of the whole job and return its results.

    One step uses `world_size * per_rank_batch_size` samples, the global batch size. data_root: what `prepare_data`
    returned (default: the sample that comes with the lab); checkpoint: where rank 0 writes the trained weights.

    Returns a dict: `losses` (this rank's mean loss, one per epoch), `global_losses` (the same over all ranks),
    `seconds` (one per epoch; the first includes what PyTorch imports at its first step), `accuracy` (share of all
    test images, each counted once), `fingerprint`, and `weights` (a state_dict on the CPU).
    Raises ValueError for an unknown model, a backend that can't work here, or fewer images than ranks.
    """
    check_options(model, epochs, per_rank_batch_size)
    device = start(rank, world_size, backend)
    try:
        # Data: every rank opens the same files, and the sampler deals each rank its own part of them.
        root = data_root or prepare_data()
        train_set, test_set = mnist(root, train=True), mnist(root, train=False)
        sampler = DistributedSampler(train_set, num_replicas=world_size, rank=rank, shuffle=True, seed=seed)
        loader = DataLoader(train_set, batch_size=per_rank_batch_size, sampler=sampler)  # the sampler shuffles
        test_loader = DataLoader(shard(test_set, rank, world_size), batch_size=256)

        # Model: DDP copies rank 0's weights to every rank here, and averages the gradients in every backward.
        torch.manual_seed(seed)
        raw_model = MODELS[model]().to(device)
        ddp_model = DistributedDataParallel(raw_model, device_ids=[device] if device.type == "cuda" else None)
        optimizer = torch.optim.SGD(ddp_model.parameters(), lr=lr, momentum=0.9)

        losses, global_losses, seconds = [], [], []
        log(total_steps=epochs * len(loader), fingerprint=fingerprint(raw_model))
        for epoch in range(epochs):
            started = time.perf_counter()
            sampler.set_epoch(epoch)  # without it, every epoch has the order of the first
            loss_sum, samples = train_epoch(ddp_model, loader, optimizer, device, first_step=epoch * len(loader))
            seconds.append(time.perf_counter() - started)
            losses.append((loss_sum / samples).item())
            global_losses.append(mean_over_ranks(loss_sum, samples))
            log(epoch=epoch + 1, global_loss=global_losses[-1], fingerprint=fingerprint(raw_model))

        accuracy = evaluate(raw_model, test_loader, device)
        if rank == 0 and checkpoint is not None:
            save_checkpoint(raw_model, checkpoint)
        return {
            "losses": losses,
            "global_losses": global_losses,
            "seconds": seconds,
            "accuracy": accuracy,
            "fingerprint": fingerprint(raw_model),
            "weights": raw_model.cpu().state_dict(),
        }
    finally:
        dist.destroy_process_group()


def start(rank: int, world_size: int, backend: str) -> torch.device:
    """Join the process group and return this rank's device."""
    backend, why = choose_backend(world_size, backend)
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    device = device_for(local_rank, backend)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # ranks share the cores; and another number of threads rounds differently
    if rank == 0:
        print(f"backend {backend}: {why}")
    # A single plain process needs no meeting point; all others find it in MASTER_ADDR and MASTER_PORT.
    alone = world_size == 1 and "MASTER_ADDR" not in os.environ
    dist.init_process_group(
        backend,
        rank=rank,
        world_size=world_size,
        store=dist.HashStore() if alone else None,
        device_id=device if device.type == "cuda" else None,
    )
    return device


def train_epoch(ddp_model, loader, optimizer, device, first_step: int) -> tuple[torch.Tensor, int]:
    """Go through this rank's part of the data once; return the sum of its losses and the number of its samples."""
    criterion = nn.CrossEntropyLoss()
    loss_sum, samples = torch.zeros((), device=device), 0
    ddp_model.train()
    for step, (images, labels) in enumerate(loader, start=first_step + 1):
        images, labels = images.to(device), labels.to(device)
        optimizer.zero_grad()
        loss = criterion(ddp_model(images), labels)
        loss.backward()  # returns when the gradients are the mean over all ranks
        optimizer.step()  # so every rank takes the same step, and the replicas stay equal
        loss_sum += loss.detach() * len(labels)
        samples += len(labels)
        log(step=step, loss=loss, samples=len(labels))
    return loss_sum, samples


def mean_over_ranks(loss_sum: torch.Tensor, samples: int) -> float:
    """The mean over all samples of all ranks: sums are reduced, because a mean of means weighs small parts too much."""
    totals = torch.tensor([loss_sum.item(), samples], dtype=torch.float64).to(loss_sum.device)
    dist.all_reduce(totals)
    return (totals[0] / totals[1]).item()


def evaluate(raw_model, loader, device) -> float:
    """Return the share of images that are recognised, over the parts of all ranks.

    Call it on every rank with `shard(test_set, rank, world_size)`: a DistributedSampler would repeat some images to
    make the parts equal. It takes the model without the DDP wrapper, whose forward may wait for other ranks.
    """
    correct_and_count = torch.zeros(2, dtype=torch.int64, device=device)
    raw_model.eval()
    with torch.no_grad():
        for images, labels in loader:
            guesses = raw_model(images.to(device)).argmax(dim=1)
            correct_and_count[0] += (guesses == labels.to(device)).sum()
            correct_and_count[1] += len(labels)
    dist.all_reduce(correct_and_count)
    return (correct_and_count[0] / correct_and_count[1]).item()


def save_checkpoint(raw_model: nn.Module, path: str | os.PathLike) -> None:
    """Write the weights, without DDP's `module.` prefix; a reader sees the old file or the new one, never a part."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".part")
    torch.save(raw_model.state_dict(), unfinished)
    os.replace(unfinished, path)


def check_options(model: str, epochs: int, per_rank_batch_size: int) -> None:
    """Raise ValueError, naming the culprit and the cure, for options that can't work."""
    if model not in MODELS:
        raise ValueError(f"model={model!r} is not in the lab: use {' or '.join(map(repr, MODELS))}")
    if epochs < 1:
        raise ValueError(f"epochs={epochs} trains nothing: use 1 or more")
    if per_rank_batch_size < 1:
        raise ValueError(f"per_rank_batch_size={per_rank_batch_size} is no batch: use 1 or more")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `train`, with the same names and defaults."""
    parser.add_argument("--model", choices=sorted(MODELS), default="simplenet")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--per-rank-batch-size", type=int, default=64, help="samples per rank and step")
    parser.add_argument("--lr", type=float, default=0.02, help="learning rate of SGD")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", choices=["auto", "gloo", "nccl"], default="auto")
    parser.add_argument("--data-root", help="what prepare_data returned; default: the sample")
    parser.add_argument("--checkpoint", help="where rank 0 writes the trained weights")


def report(rank: int, result: dict) -> None:
    """Print one rank's results."""
    losses = " ".join(f"{loss:.3f}" for loss in result["losses"])
    print(f"rank {rank}: loss per epoch {losses}, weights {result['fingerprint']}", flush=True)


def report_all(result: dict) -> None:
    """Print what holds for all ranks, from the results of any."""
    losses = " ".join(f"{loss:.3f}" for loss in result["global_losses"])
    print(f"all ranks: loss per epoch {losses}", flush=True)
    print(f"accuracy on held-out images: {result['accuracy']:.3f}", flush=True)


def main() -> None:
    """Be one rank: the one that torchrun's variables name, or the only one."""
    parser = argparse.ArgumentParser(prog="python -m ddp_lab.train", description=train.__doc__.splitlines()[0])
    add_options(parser)
    options = vars(parser.parse_args())
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    try:
        check_options(options["model"], options["epochs"], options["per_rank_batch_size"])
    except ValueError as error:
        parser.error(str(error))
    result = train(rank, world_size, **options)
    report(rank, result)
    if rank == 0:
        report_all(result)


if __name__ == "__main__":
    main()
