"""What to do about errors that learners of distributed training meet: their words, and the cure. Pure."""

import re

TRACE_CURE = "the traceback below shows how it came there"
LESS_MEMORY = "use fewer ranks, a smaller batch or a smaller model"
PLATFORMS = "gloo works on Linux and macOS, and on Windows inside WSL2: run the lab there, or in a hosted notebook"
KNOWN = {
    r"initialize the default process group twice": "call dist.destroy_process_group() before making the group again",
    r"process group has not been initialized": "call dist.init_process_group('gloo') at the start of the function",
    r"invalid (root|source|destination) rank|Global rank \d+ is not part": "src and dst are ranks from 0 to "
    "world_size - 1, and members of the group",
    r"two processes|ranks are too few": "leave out rank and world_size: init_process_group knows them",
    r"finished reduction in the prior iteration": "use every parameter in the loss, or pass "
    "find_unused_parameters=True to DistributedDataParallel",
    r"mark a variable ready only once": "use each parameter once per backward, or pass static_graph=True to "
    "DistributedDataParallel",
    r"any parameters? that requires? a gradient": "DistributedDataParallel is for models that are trained: use the "
    "model itself",
    r"appears not to match (sizes|strides)|inconsistent \d+ params": "build the same model on every rank",
    r"Unable to find address for|ifa != nullptr": "unset GLOO_SOCKET_IFNAME, so that the lab chooses loopback",
    r"unsupported gloo device|makeDevice": PLATFORMS,
    r"No backend type associated with device type": "move the tensor to the device of the backend: the CPU for gloo, "
    "its own GPU for nccl",
    r"DataLoader worker .* (exited unexpectedly|is killed by signal)": "use num_workers=0, which shows why; if memory "
    "ran out, " + LESS_MEMORY,
    r"DefaultCPUAllocator|out of memory|MemoryError|Cannot allocate memory": LESS_MEMORY,
    r"No space left on device|PytorchStreamWriter failed|inline_container.*unexpected pos": "free some "
    "space, or write to another disk",
    r"Read-only file system|Permission denied": "write to a folder of your own",
    r"Too many open files": "close what you open, for instance with `with open(…)`, or raise the limit: ulimit -n 4096",
    r"Cannot re-initialize CUDA in forked": "use DataLoader workers for the CPU's work only",
    r"address already in use|EADDRINUSE": "leave out init_method and store: the lab has a free port for each run",
    r"client socket has (failed|timed out)|Name or service not known|getaddrinfo": "leave out init_method: the lab "
    "has the ranks meet on this machine",
    r"get_ipython": "a rank is a process of its own, without the notebook: keep magics and ! outside the function",
    r"No module named": "install it in the environment of this notebook, or define what it holds in a cell",
    r"EOF when reading a line": "a rank has no keyboard: ask in the notebook, and pass the answer to launch",
    r"KeyboardInterrupt": "let the function return instead of interrupting the process",
}


def of(error: str) -> str:
    """Return the cure of an error, told as "Type: message"; for one that is not known, where to look."""
    return next((cure for words, cure in KNOWN.items() if re.search(words, error, re.IGNORECASE)), TRACE_CURE)
