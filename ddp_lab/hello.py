"""The smallest function that can run as a rank. Also `torchrun --nproc_per_node=2 -m ddp_lab.hello`."""

import os


def hello(rank: int, world_size: int) -> str:
    """Print which rank this is, and return the same text."""
    text = f"hello from rank {rank} of {world_size}"
    print(f"{text}\n", end="", flush=True)  # one write: under torchrun the ranks share a pipe, and lines would join
    return text


if __name__ == "__main__":
    hello(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
