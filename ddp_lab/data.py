"""MNIST: the shipped sample, or the full set, downloaded once by one process; and which part of it each rank reads.

    root = prepare_data()                                    # before launching: once, in one process
    dataset = mnist(root, train=True)                        # in every rank
    part = shard(dataset, rank, world_size)                  # for evaluation; a DistributedSampler deals for training

http://yann.lecun.com/exdb/mnist/ describes the files; data/README.md says where the sample is from.
"""

import fcntl
import hashlib
import math
import os
import shutil
import socket
import struct
import sys
import warnings
from http.client import HTTPException
from pathlib import Path
from typing import TextIO

from torch.utils.data import Dataset, Subset, TensorDataset
from torchvision import datasets, transforms
from torchvision.datasets.mnist import read_image_file, read_label_file

REPOSITORY_DATA = Path(__file__).resolve().parent.parent / "data"
TIMEOUT_SECONDS = 10  # of one attempt to connect or to read, so that a dead network ends in a message
MEAN, STD = 0.1307, 0.3081  # of the pixels of MNIST's 60,000 training images
IMAGES_MAGIC, LABELS_MAGIC = 2051, 2049  # IDX: type uint8 (8) × 256 + number of axes (3 or 1)
SAMPLE_SHA256 = {
    "train-images-idx3-ubyte": "df907b1daff37d9019b2398e4c0ee537bb81cab90adf5d8abe5aa6f42ce203e2",
    "train-labels-idx1-ubyte": "879f54c9fa7f1c5fce6daf8bba0809d673264cca3d0688e6eae5665679e25665",
    "t10k-images-idx3-ubyte": "540509082a594c58eb87c35f1c340847beb6cba219b71d11ad30a3470ebb51db",
    "t10k-labels-idx1-ubyte": "626d335582945cbb7f23115c77eebce3e88fbccc8458a114bac9a3ce2449a9e7",
}


def data_folder() -> Path:
    """Return the folder that $DDP_LAB_DATA names, else `data/` beside the package.

    Raises FileNotFoundError when it isn't there.
    """
    if named := os.environ.get("DDP_LAB_DATA"):
        if not Path(named).is_dir():
            raise FileNotFoundError(f"DDP_LAB_DATA names {named}, which is no folder: create it or unset DDP_LAB_DATA")
        return Path(named)
    if not (REPOSITORY_DATA / "sample").is_dir():
        raise FileNotFoundError(f"{REPOSITORY_DATA} has no MNIST sample: set DDP_LAB_DATA to the repository's data")
    return REPOSITORY_DATA


def prepare_data(full: bool = False) -> Path:
    """Return the root to pass to `mnist`: the shipped sample (4,000 + 1,000 digits), or the full set (60,000 + 10,000).

    Call it once, before the ranks start. Processes that ask for the full set at once wait for one download of 12 MB.
    Without a network it warns, says what to do, and returns the sample.
    Raises RuntimeError when a rank would have to download, and what `check_files` raises for files that are no MNIST.
    """
    if not full:
        return _sample_root()
    folder = data_folder()
    if _is_present(folder):
        return folder
    _refuse_in_ranks()
    if problem := _download_once(folder):
        sample = _sample_root()
        warnings.warn(f"the sample in {sample} is used, because {problem}", stacklevel=2)
        return sample
    return folder


def check_files(root: str | os.PathLike) -> None:
    """Read headers, sizes and labels of the four files under root/MNIST/raw; for the sample also the checksums.

    Raises FileNotFoundError or ValueError that names the file, what is wrong with it and the cure.
    """
    raw = _raw(root)
    for part in ("train", "t10k"):
        labels_file = raw / f"{part}-labels-idx1-ubyte"
        images = _check_header(raw / f"{part}-images-idx3-ubyte", IMAGES_MAGIC, (28, 28))
        labels = _check_header(labels_file, LABELS_MAGIC, ())
        if images != labels:
            raise _refusal(labels_file, f"holds {labels} labels for {images} images")
        if (largest := max(labels_file.read_bytes()[8:], default=0)) > 9:
            raise _refusal(labels_file, f"holds the label {largest}, and MNIST's are 0 to 9")
    if _is_sample(root):
        for name, expected in SAMPLE_SHA256.items():
            if hashlib.sha256((raw / name).read_bytes()).hexdigest() != expected:
                raise _refusal(raw / name, "is not the file that the lab ships")


def mnist(root: str | os.PathLike, train: bool) -> TensorDataset:
    """Return the training or the test digits under `root`, normalised; only reads, so any number of ranks may call it.

    images: float32 [n, 1, 28, 28]; labels: int64 [n]. The full training set takes 188 MB in each rank.
    Raises what `check_files` raises.
    """
    check_files(root)
    part = "train" if train else "t10k"
    pixels = read_image_file(_raw(root) / f"{part}-images-idx3-ubyte")
    # The values are those of ToTensor and Normalize, computed once for all samples. torchvision's dataset computes them
    # for each sample again, 25 times slower: a loader on one core yields 11,000 samples a second against 270,000.
    images = transforms.Normalize((MEAN,), (STD,), inplace=True)(pixels.unsqueeze(1).float().div_(255))
    return TensorDataset(images, read_label_file(_raw(root) / f"{part}-labels-idx1-ubyte"))


def shard(dataset: Dataset, rank: int, world_size: int) -> Subset:
    """Return every `world_size`-th sample from `rank` on: over all ranks each sample exactly once.

    Shards differ in length by at most one and may be empty. DistributedSampler would pad them, and count samples twice.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank={rank} is none of the {world_size} ranks: they count from 0 to {world_size - 1}")
    return Subset(dataset, range(rank, len(dataset), world_size))


def _raw(root: str | os.PathLike) -> Path:
    return Path(root) / "MNIST" / "raw"  # torchvision's layout


def _is_sample(root: str | os.PathLike) -> bool:
    return Path(root).resolve().name == "sample"


def _sample_root() -> Path:
    """DDP_LAB_DATA may name an empty folder on a large disk; the sample is then the repository's."""
    own = data_folder() / "sample"
    if own.is_dir() or not (REPOSITORY_DATA / "sample").is_dir():
        return own
    return REPOSITORY_DATA / "sample"


def _is_present(folder: Path) -> bool:
    """Return False for no files at all. Raises what `check_files` raises for some, damaged or foreign files."""
    raw = _raw(folder)
    if not raw.is_dir() or not any(raw.iterdir()):
        return False
    check_files(folder)
    return True


def _refuse_in_ranks() -> None:
    """Every rank would download at once, or wait in a collective for the one that does."""
    if "RANK" in os.environ and os.environ.get("WORLD_SIZE") != "1":
        raise RuntimeError(
            f"rank {os.environ['RANK']} must not download MNIST: before you start the ranks, run once "
            'python -c "import ddp_lab; ddp_lab.prepare_data(full=True)"'
        )


def _lock(path: Path) -> TextIO:
    """Return the open file once this process has it alone. The system frees it at close, also when the process dies."""
    lock = path.open("a")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print("MNIST: waiting for another process, which is downloading it", file=sys.stderr, flush=True)
        fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


def _download_once(folder: Path) -> str:
    """Return "" once the full set is there, whichever process downloaded it, else why it isn't and the cure."""
    try:
        lock = _lock(folder / ".download.lock")
    except OSError as error:
        return f"{folder} can't be written ({error.strerror}): set DDP_LAB_DATA to a folder of your own"
    with lock:
        if _is_present(folder):
            return ""
        print(f"MNIST: downloading the full set to {folder}, once", file=sys.stderr, flush=True)
        try:
            _download(folder)
        except (OSError, RuntimeError, ValueError, HTTPException) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[-1].rstrip(".")
            return (
                f"MNIST could not be downloaded ({reason}): connect to the network and call again, "
                f"or put the unpacked files {', '.join(SAMPLE_SHA256)} in {_raw(folder)}"
            )
    return ""


def _download(folder: Path) -> None:
    """Fill folder/MNIST/raw at once or not at all; the caller holds the lock. torchvision checks each file's md5."""
    temporary = folder / ".download"
    shutil.rmtree(temporary, ignore_errors=True)  # what a killed download left
    timeout = socket.getdefaulttimeout()
    socket.setdefaulttimeout(TIMEOUT_SECONDS)  # torchvision sets none, and would wait for a dead network for ever
    try:
        datasets.MNIST(temporary, download=True)
        check_files(temporary)
        for packed in _raw(temporary).glob("*.gz"):
            packed.unlink()
        _raw(folder).parent.mkdir(exist_ok=True)
        _raw(temporary).rename(_raw(folder))  # atomic: same disk, and the target is absent or an empty folder
    finally:
        socket.setdefaulttimeout(timeout)
        shutil.rmtree(temporary, ignore_errors=True)


def _check_header(path: Path, magic: int, shape: tuple[int, ...]) -> int:
    """Return how many items of `shape` the file holds. Raises unless its type and its exact size are as they should."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: {_cure(path)}")
    length = 4 * (2 + len(shape))
    with path.open("rb") as file:
        header = file.read(length)
    if len(header) < length:
        raise _refusal(path, f"ends after {len(header)} bytes, within its header")
    found, count, *found_shape = struct.unpack(f">{length // 4}I", header)
    if found != magic:
        raise _refusal(path, f"starts with the number {found} instead of {magic}, so it is another kind of file")
    if tuple(found_shape) != shape:
        raise _refusal(path, f"holds images of {'×'.join(map(str, found_shape))} pixels instead of 28×28")
    size, expected = path.stat().st_size, length + count * math.prod(shape)
    if size != expected:
        raise _refusal(path, f"has {size} bytes where its header promises {expected}")
    return count


def _refusal(path: Path, wrong: str) -> ValueError:
    return ValueError(f"{path} {wrong}: {_cure(path)}")


def _cure(path: Path) -> str:
    if _is_sample(path.parents[2]):
        return "restore it with git checkout -- data/sample"
    return f"put MNIST's own file there, unpacked, or delete {path.parent} and call prepare_data(full=True)"
