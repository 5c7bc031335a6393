"""From the cell to the first DDP step, for every way to start two ranks: `python benchmarks/launch.py [ROUNDS]`.

Each time is taken in a fresh process that has imported what a notebook would have imported. The ways take turns, so
that a slow minute of the machine slows all of them.
"""

import importlib.util
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WAYS = ["mp.spawn", "launch", "launch after fast_start"]
if importlib.util.find_spec("accelerate"):
    WAYS.append("accelerate's notebook_launcher")
WORLD_SIZE = 2


def first_step(rank, world_size, folder):
    """Train one step, and write down when it was done."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    model = DistributedDataParallel(torch.nn.Linear(784, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(64, 784)).sum().backward()
    optimizer.step()
    (Path(folder) / str(rank)).write_text(str(time.time()))
    dist.destroy_process_group()


def first_step_of_accelerate(folder):
    first_step(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), folder)


def seconds_of(way: str) -> float:
    """Start two ranks in one way, in this process; return the seconds until the last of them made its first step."""
    import torch.multiprocessing as mp

    import ddp_lab

    with tempfile.TemporaryDirectory() as folder:
        if way == "launch after fast_start":
            ddp_lab.fast_start()
            ddp_lab.launch(first_step, folder, on_event=None)
        if way == "mp.spawn":
            with socket.create_server(("127.0.0.1", 0)) as free:
                os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free.getsockname()[1]))
        started = time.time()
        if way == "mp.spawn":
            mp.spawn(first_step, args=(WORLD_SIZE, folder), nprocs=WORLD_SIZE)
        elif way.startswith("launch"):
            ddp_lab.launch(first_step, folder, on_event=None)
        else:
            from accelerate import notebook_launcher

            notebook_launcher(first_step_of_accelerate, (folder,), num_processes=WORLD_SIZE)
        return max(float(file.read_text()) for file in Path(folder).iterdir()) - started


def measure(way: str) -> float | None:
    """Take one time in a fresh process; None when it fails there."""
    done = subprocess.run(
        [sys.executable, __file__, "--one", way],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None


def main(rounds: int) -> None:
    times = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way in WAYS:
            times[way].append(measure(way))
    print(f"{WORLD_SIZE} ranks, {rounds} rounds: seconds from the call to the first DDP step, and ratio to mp.spawn")
    for way, taken in times.items():
        if None in taken:
            print(f"{way:32} failed in {taken.count(None)} of {rounds} rounds")
            continue
        ratios = [seconds / other for seconds, other in zip(taken, times["mp.spawn"], strict=True)]
        print(f"{way:32} {statistics.median(taken):6.2f} s   ratio {statistics.median(ratios):5.2f}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(seconds_of(sys.argv[2])))
    else:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
