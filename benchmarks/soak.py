"""Launch again and again, successes and faults mixed, and count what is wrong or left behind.

Run `python benchmarks/soak.py`. The faults, and the verdicts that they must get, are those of tests/test_faults.py.
The exit status is 1 if any figure falls short.
"""

import argparse
import gc
import multiprocessing
import multiprocessing.util
import os
import random
import re
import sys
import tempfile
import time
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
import test_faults
from conftest import descendants, listening

import ddp_lab

ME = psutil.Process()
MIB = 1 << 20
MAY_GROW_MIB = 50  # over 300 launches; a leak of one log or one trace per launch would be more


def left() -> dict[str, int]:
    """Return how much of each kind there is now: of this process, and of temporary files."""
    gc.collect()
    return {
        "processes": len(descendants(ME)),
        "listening sockets": len(listening(ME)),
        "file descriptors": ME.num_fds(),
        "temporary files": len(os.listdir(tempfile.gettempdir())),
    }


def right(fault: tuple, world_size: int) -> str:
    """Launch one fault; return "" if the verdict is right and in time, else what came instead."""
    function, kind, rank, words, cure, within, timeout = fault
    started = time.monotonic()
    try:
        ddp_lab.launch(function, world_size=world_size, timeout=timeout, on_event=None)
    except ddp_lab.RankError as error:
        seconds = time.monotonic() - started
        as_it_should = (
            error.kind == kind,
            rank in (None, error.rank),
            re.search(words, f"{error}"),
            cure in error.cure,
        )
        return "" if all(as_it_should) and seconds <= within else f"{seconds:.1f} s, {error.kind}: {error}"
    return "no error"


def succeeds(world_size: int) -> str:
    results = ddp_lab.launch(test_faults.adds, world_size=world_size, on_event=None).results
    return "" if results == [float(world_size)] * world_size else f"results {results}"


def soak(launches: int, seed: int) -> int:
    """Return the number of figures that fall short."""
    choose = random.Random(seed)
    faults = [tuple(parameters.values) for parameters in test_faults.ROWS]
    todo = [faults[number // 2 % len(faults)] if number % 2 else None for number in range(launches)]
    choose.shuffle(todo)
    ddp_lab.fast_start()
    multiprocessing.RawArray("c", 2 * MIB)  # Python keeps this memory, enough for 30 ranks at once, and gives it again
    for _ in range(3):
        succeeds(3)  # what Python starts once and keeps, it starts here
    before, memory, wrong = left(), ME.memory_info().rss, []
    for number, fault in enumerate(todo, 1):
        world_size = choose.choice((2, 3))
        name = fault[0].__name__ if fault else "success"
        if complaint := right(fault, world_size) if fault else succeeds(world_size):
            wrong.append(f"{name} on {world_size} ranks: {complaint}")
        if number % 50 == 0:
            print(f"{number} of {launches} launches, {len(wrong)} wrong", flush=True)
    injected, kinds = sum(map(bool, todo)), len({fault[0].__name__ for fault in todo if fault})
    extra = {name: count - before[name] for name, count in left().items()}
    grown = (ME.memory_info().rss - memory) / MIB
    print(f"{launches} launches, {injected} faults of {kinds} kinds injected, {launches - len(wrong)} outcomes right")
    print("left behind:", ", ".join(f"{count} {name}" for name, count in extra.items()), f"· memory {grown:+.0f} MiB")
    for line in wrong:
        print(line)
    return len(wrong) + sum(count > 0 for count in extra.values()) + (grown > MAY_GROW_MIB)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("launches", type=int, nargs="?", default=300)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    folder = tempfile.TemporaryDirectory(prefix="soak-")  # or other programs' files would be counted too
    tempfile.tempdir = os.environ["TMPDIR"] = folder.name
    # After multiprocessing has removed its own folder in it, which has -100.
    multiprocessing.util.Finalize(None, folder.cleanup, exitpriority=-200)
    sys.exit(soak(options.launches, options.seed) > 0)
