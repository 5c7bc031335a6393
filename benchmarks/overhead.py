"""What the live dashboard costs: `python benchmarks/overhead.py [ROUNDS]`.

Trains with two ranks, in turn from a notebook kernel with the dashboard, from the same kernel without it, and under
`torchrun`, and compares the samples per second of the slower rank, from the second epoch on.
"""

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from jupyter_client.manager import KernelManager

WORLD_SIZE = 2
EPOCHS = {"simplenet": 40, "convnet": 6}
TRAIN_IMAGES = 4000
FIRST_CELL = """
import json, ddp_lab
from pathlib import Path
ddp_lab.fast_start()
ddp_lab.launch(ddp_lab.hello)
"""
CELL = """
run = ddp_lab.launch(ddp_lab.train, world_size={world_size}, model={model!r}, epochs={epochs}, on_event={on_event!r})
Path({path!r}).write_text(json.dumps([result["seconds"] for result in run.results]))
"""


def samples_per_second(seconds_by_rank: list[list[float]]) -> float:
    """The speed of the whole run in its median epoch, less the first."""
    slower = [max(epoch) for epoch in zip(*seconds_by_rank, strict=True)]
    return TRAIN_IMAGES / statistics.median(slower[1:])


@contextlib.contextmanager
def notebook() -> Iterator[Callable[..., float]]:
    """Start a kernel; yield a function that trains in it and returns the samples per second."""
    manager = KernelManager(kernel_name="python3")
    manager.start_kernel(env={**os.environ, "OMP_NUM_THREADS": "1"})
    client = manager.blocking_client()
    client.start_channels()

    def execute(cell: str) -> None:
        reply = client.execute_interactive(cell, timeout=300, output_hook=lambda message: None)
        assert reply["content"]["status"] == "ok", reply["content"]

    def train(model: str, folder: Path, on_event: str | None) -> float:
        path = folder / "notebook.json"
        options = {"world_size": WORLD_SIZE, "model": model, "epochs": EPOCHS[model], "on_event": on_event}
        execute(CELL.format(path=str(path), **options))
        return samples_per_second(json.loads(path.read_text()))

    try:
        client.wait_for_ready(timeout=60)
        execute(FIRST_CELL)
        yield train
    finally:
        client.stop_channels()
        manager.shutdown_kernel()


def under_torchrun(model: str, folder: Path) -> float:
    command = ["torch.distributed.run", "--standalone", f"--nproc_per_node={WORLD_SIZE}", __file__, "--rank", model]
    subprocess.run([sys.executable, "-m", *command, str(folder)], check=True, capture_output=True)
    return samples_per_second([json.loads((folder / f"{rank}.json").read_text()) for rank in range(WORLD_SIZE)])


def be_a_rank(model: str, folder: Path) -> None:
    import ddp_lab

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    result = ddp_lab.train(rank, world_size, model=model, epochs=EPOCHS[model])
    (folder / f"{rank}.json").write_text(json.dumps(result["seconds"]))


def main(rounds: int) -> None:
    with notebook() as in_a_notebook:
        for model in EPOCHS:
            ways = {
                "dashboard": partial(in_a_notebook, on_event="auto"),
                "no dashboard": partial(in_a_notebook, on_event=None),
                "torchrun": under_torchrun,
            }
            compare(model, ways, rounds)


def compare(model: str, ways: dict[str, Callable[[str, Path], float]], rounds: int) -> None:
    """Let the ways take turns, in both orders, and print the ratios of the first to the others within the rounds."""
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            for name in list(ways) if number % 2 else reversed(ways):
                speeds[name].append(ways[name](model, Path(folder)))
    first, *others = speeds
    print(f"{model}, {rounds} rounds: {statistics.median(speeds[first]):,.0f} samples/s with the {first}")
    for other in others:
        show(f"ratio to {other}", [live / bare for live, bare in zip(speeds[first], speeds[other], strict=True)])


def show(name: str, ratios: list[float]) -> None:
    """Print the median of the rounds' ratios, and how far they spread."""
    ratios, quarter = sorted(ratios), len(ratios) // 4
    print(
        f"    {name}: {statistics.median(ratios):.3f} "
        f"(half of the rounds between {ratios[quarter]:.3f} and {ratios[-1 - quarter]:.3f})",
        flush=True,
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        be_a_rank(sys.argv[2], Path(sys.argv[3]))
    else:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 12)
