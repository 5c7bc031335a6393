"""The sample is real and complete, the download happens once or leaves nothing, and every sample is read once."""

import contextlib
import gzip
import hashlib
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain
from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset
from torchvision import datasets, transforms

from ddp_lab import data

REPOSITORY = Path(__file__).resolve().parent.parent
SAMPLE = REPOSITORY / "data" / "sample"
NAMES = list(data.SAMPLE_SHA256)
PREPARE = """
import json, sys
from torchvision.datasets import MNIST
MNIST.mirrors, MNIST.resources = json.loads(sys.argv[1])
from ddp_lab.data import prepare_data
print(prepare_data(full=True))
"""


class Mirror(ThreadingHTTPServer):
    """Serves `files` on loopback; while `gate` is closed, it sends half of a file and waits."""

    daemon_threads = True

    def __init__(self, files: dict[str, bytes]):
        super().__init__(("127.0.0.1", 0), MirrorHandler)
        self.files = dict(files)
        self.downloads: list[str] = []
        self.gate = threading.Event()
        self.gate.set()
        self.halfway = threading.Event()
        self.torchvision = (
            [f"http://127.0.0.1:{self.server_port}/"],
            [(name, hashlib.md5(body).hexdigest()) for name, body in files.items()],
        )


class MirrorHandler(BaseHTTPRequestHandler):
    def do_GET(self):
        name = self.path.lstrip("/")
        body = self.server.files[name]
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.headers.get("Method") == "HEAD":  # torchvision first asks for redirects, and does it with GET
            return
        self.server.downloads.append(name)
        with contextlib.suppress(OSError):  # the client was killed
            self.wfile.write(body[: len(body) // 2])
            self.server.halfway.set()
            if self.server.gate.wait(60):
                self.wfile.write(body[len(body) // 2 :])

    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def packed():
    return {f"{name}.gz": gzip.compress((SAMPLE / "MNIST" / "raw" / name).read_bytes(), 1) for name in NAMES}


@pytest.fixture
def mirror(packed, monkeypatch):
    server = Mirror(packed)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    monkeypatch.setattr(datasets.MNIST, "mirrors", server.torchvision[0])
    monkeypatch.setattr(datasets.MNIST, "resources", server.torchvision[1])
    yield server
    server.gate.set()
    server.shutdown()
    server.server_close()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A data folder with the sample and without the full set, as after cloning; this process is no rank."""
    monkeypatch.setenv("DDP_LAB_DATA", str(tmp_path))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    shutil.copytree(SAMPLE, tmp_path / "sample")
    return tmp_path


@pytest.fixture
def raw(tmp_path):
    """The four files under a root that is not called "sample", so that checksums are not compared."""
    shutil.copytree(SAMPLE / "MNIST", tmp_path / "root" / "MNIST")
    return tmp_path / "root" / "MNIST" / "raw"


def files_of(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "MNIST" / "raw").glob("*"))


def start_prepare(mirror: Mirror, stderr: Path) -> subprocess.Popen:
    command = [sys.executable, "-c", PREPARE, json.dumps(mirror.torchvision)]
    with stderr.open("w") as file:
        return subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=file, text=True)


def closed_port() -> str:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{unused.getsockname()[1]}/"


# The shipped sample


@pytest.mark.parametrize(("train", "per_digit"), [(True, 400), (False, 100)])
def test_sample_has_every_digit_equally_often_and_shuffled(train, per_digit):
    images, labels = data.mnist(SAMPLE, train).tensors
    assert images.shape == (10 * per_digit, 1, 28, 28)
    assert torch.bincount(labels).tolist() == [per_digit] * 10
    assert len(labels[:100].unique()) == 10


def test_sample_has_5000_different_digits():
    images = torch.cat([data.mnist(SAMPLE, train).tensors[0] for train in (True, False)])
    assert len(images.flatten(1).unique(dim=0)) == 5000


@pytest.mark.parametrize("train", [True, False])
def test_values_are_exactly_torchvisions(train):
    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))])
    expected = list(datasets.MNIST(SAMPLE, train=train, transform=transform))
    images, labels = data.mnist(SAMPLE, train).tensors
    assert torch.equal(images, torch.stack([image for image, _ in expected]))
    assert labels.dtype == torch.int64
    assert labels.tolist() == [label for _, label in expected]


def test_readme_states_the_checksums():
    readme = (REPOSITORY / "data" / "README.md").read_text()
    for name, checksum in data.SAMPLE_SHA256.items():
        assert f"{checksum}  {name}" in readme


def test_sample_is_used_unless_the_full_set_is_asked_for(folder):
    assert data.prepare_data() == folder / "sample"


def test_sample_of_the_repository_serves_a_folder_without_one(tmp_path, monkeypatch):
    monkeypatch.setenv("DDP_LAB_DATA", str(tmp_path))
    assert data.prepare_data() == SAMPLE


def test_data_folder_is_the_repositorys_by_default(monkeypatch):
    monkeypatch.delenv("DDP_LAB_DATA", raising=False)
    assert data.data_folder() == REPOSITORY / "data"


def test_data_folder_that_does_not_exist_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("DDP_LAB_DATA", str(tmp_path / "absent"))
    with pytest.raises(FileNotFoundError, match=r"DDP_LAB_DATA names .*absent"):
        data.data_folder()
    monkeypatch.delenv("DDP_LAB_DATA")
    monkeypatch.setattr(data, "REPOSITORY_DATA", tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="nowhere has no MNIST sample"):
        data.data_folder()


@contextlib.contextmanager
def read_only(folder: Path):
    """Without write permission, and not as root, who needs none."""
    folders = [folder, *(path for path in folder.rglob("*") if path.is_dir())]
    user = os.geteuid()
    for path in folders:
        path.chmod(0o555)
    if user == 0:
        os.seteuid(65534)  # nobody
    try:
        yield
    finally:
        os.seteuid(user)
        for path in folders:
            path.chmod(0o755)


def test_a_read_only_folder_serves_the_sample(monkeypatch):
    with tempfile.TemporaryDirectory(dir="/tmp") as name:  # the tests' own folders are closed to other users
        folder = Path(name)
        monkeypatch.setenv("DDP_LAB_DATA", name)
        shutil.copytree(SAMPLE, folder / "sample")
        before = sorted(folder.rglob("*"))
        with read_only(folder):
            assert len(data.mnist(data.prepare_data(), train=False)) == 1000
            with pytest.warns(UserWarning, match="can't be written"):
                assert data.prepare_data(full=True) == folder / "sample"
        assert sorted(folder.rglob("*")) == before


# The download


def test_full_set_is_downloaded_checked_and_found_again(folder, mirror):
    assert data.prepare_data(full=True) == folder
    assert data.prepare_data(full=True) == folder
    assert sorted(mirror.downloads) == sorted(mirror.files)
    assert files_of(folder) == sorted(NAMES)
    assert not (folder / ".download").exists()
    assert len(data.mnist(folder, train=True)) == 4000


def test_two_processes_at_once_download_once(folder, mirror, capsys):
    mirror.gate.clear()
    other = start_prepare(mirror, folder / "stderr.txt")
    assert mirror.halfway.wait(60)
    with ThreadPoolExecutor() as pool:  # a thread, so that this process can open the gate while it waits
        own = pool.submit(data.prepare_data, full=True)
        until = time.monotonic() + 10
        while "waiting for another process" not in capsys.readouterr().err and time.monotonic() < until:
            time.sleep(0.01)
        assert not own.done()
        mirror.gate.set()
        assert own.result(60) == folder
    assert other.communicate(timeout=60)[0].strip() == str(folder)
    assert sorted(mirror.downloads) == sorted(mirror.files)


def test_a_killed_download_leaves_nothing_under_the_final_name(folder, mirror):
    mirror.gate.clear()
    process = start_prepare(mirror, folder / "stderr.txt")
    assert mirror.halfway.wait(60)
    process.kill()
    process.communicate()
    assert (folder / ".download").exists()
    assert not (folder / "MNIST").exists()

    mirror.gate.set()
    assert data.prepare_data(full=True) == folder
    assert files_of(folder) == sorted(NAMES)
    assert not (folder / ".download").exists()


def test_the_leftover_of_a_download_killed_while_unpacking_is_not_used(folder, mirror):
    shutil.copytree(SAMPLE / "MNIST", folder / ".download" / "MNIST")
    (folder / ".download" / "MNIST" / "raw" / "t10k-labels-idx1-ubyte").write_bytes(b"")
    assert data.prepare_data(full=True) == folder  # torchvision alone would take the four files as they are
    assert sorted(mirror.downloads) == sorted(mirror.files)


@pytest.mark.parametrize("damage", [lambda body: body[:-1], lambda body: b"<html>Please log in</html>"])
def test_a_wrong_checksum_ends_with_the_sample(folder, mirror, damage):
    mirror.files["t10k-images-idx3-ubyte.gz"] = damage(mirror.files["t10k-images-idx3-ubyte.gz"])
    with pytest.warns(UserWarning, match="MNIST could not be downloaded"):
        assert data.prepare_data(full=True) == folder / "sample"
    assert not (folder / "MNIST").exists()
    assert not (folder / ".download").exists()


def test_what_was_downloaded_is_checked_before_it_gets_its_name(folder, mirror, monkeypatch):
    name = "train-labels-idx1-ubyte.gz"
    mirror.files[name] = gzip.compress(struct.pack(">2I", 2049, 3) + bytes(3))
    md5 = [(file, hashlib.md5(body).hexdigest()) for file, body in mirror.files.items()]
    monkeypatch.setattr(datasets.MNIST, "resources", md5)
    with pytest.warns(UserWarning, match="holds 3 labels for 4000 images"):
        data.prepare_data(full=True)
    assert not (folder / "MNIST").exists()


def test_without_a_network_it_says_what_to_do_and_uses_the_sample(folder, monkeypatch):
    monkeypatch.setattr(datasets.MNIST, "mirrors", [closed_port()])
    with pytest.warns(UserWarning) as warned:
        assert data.prepare_data(full=True) == folder / "sample"
    message = str(warned[0].message)
    assert "refused" in message and "connect to the network" in message and str(folder / "sample") in message
    assert str(folder / "MNIST" / "raw") in message and all(name in message for name in NAMES)
    assert "\n" not in message
    assert warned[0].filename == __file__
    assert not (folder / ".download").exists()


def test_a_network_that_never_answers_is_given_up(folder, monkeypatch):
    monkeypatch.setattr(data, "TIMEOUT_SECONDS", 0.2)
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(33)
    start = time.monotonic()
    try:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            monkeypatch.setattr(datasets.MNIST, "mirrors", [f"http://127.0.0.1:{silent.getsockname()[1]}/"])
            with pytest.warns(UserWarning, match="timed out"):
                assert data.prepare_data(full=True) == folder / "sample"
        assert time.monotonic() - start < 15
        assert socket.getdefaulttimeout() == 33
    finally:
        socket.setdefaulttimeout(before)


def test_the_full_set_by_hand_needs_no_network(folder, monkeypatch):
    """The cure in the warning works, and a folder that may only be read gets no lock file."""
    shutil.copytree(SAMPLE / "MNIST", folder / "MNIST")
    monkeypatch.setattr(datasets.MNIST, "mirrors", [closed_port()])
    monkeypatch.setenv("RANK", "1")
    assert data.prepare_data(full=True) == folder
    assert not (folder / ".download.lock").exists()


def test_an_empty_folder_for_the_files_is_no_obstacle(folder, mirror):
    (folder / "MNIST" / "raw").mkdir(parents=True)
    assert data.prepare_data(full=True) == folder
    assert files_of(folder) == sorted(NAMES)


def test_damaged_files_of_the_full_set_are_named_and_kept(folder, mirror):
    shutil.copytree(SAMPLE / "MNIST", folder / "MNIST")
    (folder / "MNIST" / "raw" / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(FileNotFoundError, match="t10k-labels-idx1-ubyte is missing: put MNIST's own file there"):
        data.prepare_data(full=True)
    assert len(files_of(folder)) == 3
    assert mirror.downloads == []


def test_a_rank_must_not_download(folder, mirror, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match=r"rank 1 must not download MNIST: .* run once python -c"):
        data.prepare_data(full=True)
    assert mirror.downloads == []
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert data.prepare_data(full=True) == folder


# Files that are not what they should be


def idx(magic: int, *shape: int) -> bytes:
    return struct.pack(f">{1 + len(shape)}I", magic, *shape) + bytes(torch.Size(shape).numel())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("damage", "wrong"),
    [
        (lambda body: body[:-1], r"has \d+ bytes where its header promises \d+"),
        (lambda body: body + b"\0", r"has \d+ bytes where its header promises \d+"),
        (lambda body: body[:5], "ends after 5 bytes, within its header"),
        (lambda body: b"", "ends after 0 bytes, within its header"),
        (lambda body: gzip.compress(body, 1), "is another kind of file"),
        (lambda body: b"<html>Please log in</html>", "is another kind of file"),
    ],
)
def test_a_truncated_or_foreign_file_is_refused_by_name(raw, name, damage, wrong):
    (raw / name).write_bytes(damage((raw / name).read_bytes()))
    with pytest.raises(ValueError, match=rf"{name} .*{wrong}.*: put MNIST's own file there"):
        data.mnist(raw.parent.parent, train=True)


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_file_is_named(raw, name):
    (raw / name).unlink()
    with pytest.raises(FileNotFoundError, match=f"{name} is missing"):
        data.mnist(raw.parent.parent, train=False)


@pytest.mark.parametrize(
    ("first", "second", "wrong"),
    [
        (NAMES[0], NAMES[1], "train-images-idx3-ubyte starts with the number 2049 instead of 2051"),
        (NAMES[1], NAMES[3], "train-labels-idx1-ubyte holds 1000 labels for 4000 images"),
    ],
)
def test_swapped_files_are_refused(raw, first, second, wrong):
    one, other = (raw / first).read_bytes(), (raw / second).read_bytes()
    (raw / first).write_bytes(other)
    (raw / second).write_bytes(one)
    with pytest.raises(ValueError, match=wrong):
        data.mnist(raw.parent.parent, train=True)


def test_images_of_another_size_are_refused(raw):
    (raw / "t10k-images-idx3-ubyte").write_bytes(idx(2051, 1000, 32, 32))
    with pytest.raises(ValueError, match="t10k-images-idx3-ubyte holds images of 32×32 pixels instead of 28×28"):
        data.mnist(raw.parent.parent, train=False)


def test_labels_beyond_nine_are_refused(raw):
    (raw / "train-labels-idx1-ubyte").write_bytes(idx(2049, 4000)[:-1] + b"\x0a")
    with pytest.raises(ValueError, match="train-labels-idx1-ubyte holds the label 10"):
        data.mnist(raw.parent.parent, train=True)


@pytest.mark.parametrize("name", NAMES)
def test_a_foreign_file_of_the_same_shape_is_refused_in_the_sample(folder, name):
    path = folder / "sample" / "MNIST" / "raw" / name
    body = bytearray(path.read_bytes())
    body[-1] = (body[-1] + 1) % 10
    path.write_bytes(body)
    with pytest.raises(ValueError, match=rf"{name} is not the file that the lab ships: restore it with git checkout"):
        data.mnist(folder / "sample", train=True)


# Who reads which sample


def numbered(length: int) -> TensorDataset:
    return TensorDataset(torch.arange(length))


@pytest.mark.parametrize("world_size", range(1, 8))
@pytest.mark.parametrize("length", [0, 1, 5, 600])
def test_evaluation_reads_each_sample_exactly_once(length, world_size):
    read = [[int(x) for (x,) in data.shard(numbered(length), rank, world_size)] for rank in range(world_size)]
    assert sorted(chain(*read)) == list(range(length))
    assert max(map(len, read)) - min(map(len, read)) <= 1


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_outside_the_world_is_refused(rank):
    with pytest.raises(ValueError, match=f"rank={rank} is none of the 2 ranks"):
        data.shard(numbered(4), rank, 2)
