"""What the live dashboard costs: `python benchmarks/overhead.py [ROUNDS]`.

Trains with two ranks, in turn from a notebook kernel with the dashboard and under `torchrun`, and compares the samples
per second of the slower rank, from the second epoch on.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from jupyter_client.manager import KernelManager

WORLD_SIZE = 2
EPOCHS = {"simplenet": 12, "convnet": 6}
TRAIN_IMAGES = 4000
CELL = """
import json, ddp_lab
from pathlib import Path
run = ddp_lab.launch(ddp_lab.train, world_size={world_size}, model={model!r}, epochs={epochs})
Path({path!r}).write_text(json.dumps([result["seconds"] for result in run.results]))
"""


def samples_per_second(seconds_by_rank: list[list[float]]) -> float:
    """The speed of the whole run in its median epoch, less the first."""
    slower = [max(epoch) for epoch in zip(*seconds_by_rank, strict=True)]
    return TRAIN_IMAGES / statistics.median(slower[1:])


def in_a_notebook(model: str, folder: Path) -> float:
    path = folder / "notebook.json"
    manager = KernelManager(kernel_name="python3")
    manager.start_kernel(env={**os.environ, "OMP_NUM_THREADS": "1"})
    client = manager.blocking_client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=60)
        cell = CELL.format(world_size=WORLD_SIZE, model=model, epochs=EPOCHS[model], path=str(path))
        reply = client.execute_interactive(cell, timeout=300, output_hook=lambda message: None)
        assert reply["content"]["status"] == "ok", reply["content"]
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    return samples_per_second(json.loads(path.read_text()))


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
    for model in EPOCHS:
        ratios, speeds = [], []
        for _ in range(rounds):
            with tempfile.TemporaryDirectory() as folder:
                speeds.append((in_a_notebook(model, Path(folder)), under_torchrun(model, Path(folder))))
            ratios.append(speeds[-1][0] / speeds[-1][1])
        live, bare = (statistics.median(column) for column in zip(*speeds, strict=True))
        print(
            f"{model}: {live:,.0f} samples/s with the dashboard, {bare:,.0f} under torchrun; "
            f"ratio {statistics.median(ratios):.3f} (from {min(ratios):.3f} to {max(ratios):.3f})"
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        be_a_rank(sys.argv[2], Path(sys.argv[3]))
    else:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
