"""The main job with real ranks: right numbers, whichever way it is started."""

import os
import socket
import subprocess
import sys

import pytest
import torch
import torch.multiprocessing as mp

import ddp_lab
from ddp_lab import train
from ddp_lab.data import mnist, prepare_data
from ddp_lab.models import MODELS
from ddp_lab.train import check_options, evaluate, save_checkpoint

QUIET = {"on_event": None}


@pytest.fixture(scope="module", autouse=True)
def _fast(fast):
    yield


@pytest.fixture(scope="module")
def run(fast, tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoint") / "new" / "mnist.pt"
    return ddp_lab.launch(train, checkpoint=path, **QUIET), path


def test_it_learns_to_read_digits(run):
    result = run[0].results[0]
    assert result["accuracy"] >= 0.88
    assert result["global_losses"] == sorted(result["global_losses"], reverse=True)
    assert len(result["losses"]) == 5


def test_the_conv_net_reads_better():
    run = ddp_lab.launch(train, model="convnet", **QUIET)
    assert run.results[0]["accuracy"] >= 0.95


def test_the_ranks_see_different_data_and_keep_equal_weights(run):
    first, second = run[0].results
    assert first["losses"] != second["losses"]
    assert first["fingerprint"] == second["fingerprint"]
    assert all(torch.equal(first["weights"][name], second["weights"][name]) for name in first["weights"])
    assert (first["accuracy"], first["global_losses"]) == (second["accuracy"], second["global_losses"])


def test_the_global_loss_is_the_mean_over_all_samples(run):
    first, second = run[0].results
    means = [(a + b) / 2 for a, b in zip(first["losses"], second["losses"], strict=True)]  # 2,000 samples each
    assert first["global_losses"] == pytest.approx(means, rel=1e-5)


def test_every_step_of_every_rank_is_logged(run):
    log = run[0].log
    steps_per_epoch = 32  # 4,000 images, 2 ranks, 64 a step: 31.25, and the last step is smaller
    for rank in (0, 1):
        steps, losses = log.series("loss", rank)
        assert steps == list(range(1, 5 * steps_per_epoch + 1))
        assert all(0 < loss < 5 for loss in losses)
        assert sum(log.series("samples", rank)[1]) == 5 * 2000
        assert log.series("total_steps", rank)[1] == [160]
    assert log.series("fingerprint", 0)[1] == log.series("fingerprint", 1)[1]
    assert len(set(log.series("fingerprint", 0)[1])) == 6


def test_the_checkpoint_loads_into_a_plain_model_and_is_as_good(run):
    result, path = run[0].results[0], run[1]
    model = MODELS["simplenet"]()
    model.load_state_dict(torch.load(path, weights_only=True))
    images, labels = mnist(prepare_data(), train=False).tensors
    assert (model(images).argmax(1) == labels).sum().item() / len(labels) == pytest.approx(result["accuracy"])
    assert [file.name for file in path.parent.iterdir()] == ["mnist.pt"]


def test_a_failed_save_keeps_the_old_checkpoint(tmp_path, monkeypatch):
    path = tmp_path / "mnist.pt"
    model = MODELS["simplenet"]()
    save_checkpoint(model, path)
    before = path.read_bytes()
    monkeypatch.setattr(os, "replace", lambda *args: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        save_checkpoint(MODELS["simplenet"](), path)
    assert path.read_bytes() == before


def test_the_same_seed_gives_the_same_bits_and_another_seed_others(run):
    again = ddp_lab.launch(train, epochs=5, **QUIET).results[0]["fingerprint"]
    assert again == run[0].results[0]["fingerprint"]
    assert ddp_lab.launch(train, epochs=5, seed=1, **QUIET).results[0]["fingerprint"] != again


class Constant(torch.nn.Module):
    """Says "label 3" to every image."""

    def forward(self, images):
        return torch.nn.functional.one_hot(torch.full((len(images),), 3), 10).float()


def evaluates(rank, world_size, size):
    from torch.utils.data import DataLoader, TensorDataset

    from ddp_lab.data import shard

    torch.distributed.init_process_group("gloo")
    labels = torch.arange(size) % 4
    data = TensorDataset(torch.zeros(size, 1, 28, 28), labels)
    return evaluate(Constant(), DataLoader(shard(data, rank, world_size), batch_size=3), torch.device("cpu"))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_accuracy_counts_every_sample_once_whatever_the_world_size(world_size):
    """Of 10 labels 0 1 2 3 0 1 2 3 0 1, two are 3; padding to 12 for three ranks would make it 2 of 12."""
    assert ddp_lab.launch(evaluates, 10, world_size=world_size, **QUIET).results == [pytest.approx(0.2)] * world_size


def test_more_ranks_than_samples_still_evaluate():
    assert ddp_lab.launch(evaluates, 2, world_size=3, **QUIET).results == [0.0] * 3


# ---- the same function without the lab's launcher ----------------------------------------------------------------


def command(*arguments, **environment):
    clean = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "MASTER_ADDR")}
    done = subprocess.run(
        [sys.executable, "-m", *arguments], env={**clean, **environment}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def saved(path):
    return torch.load(path, weights_only=True)


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_torchrun_gives_the_same_weights(run, tmp_path):
    path = str(tmp_path / "torchrun.pt")
    out = command(
        "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "ddp_lab.train", "--checkpoint", path
    )
    assert equal(saved(path), run[0].results[0]["weights"])
    assert "accuracy on held-out images: 0." in out


def test_one_plain_process_gives_the_same_weights_as_one_rank(tmp_path):
    path = str(tmp_path / "plain.pt")
    out = command("ddp_lab.train", "--epochs", "1", "--checkpoint", path)
    assert "backend gloo: this machine has 0 GPUs for 1 rank" in out or "backend nccl" in out
    one_rank = ddp_lab.launch(train, epochs=1, world_size=1, **QUIET)
    assert equal(saved(path), one_rank.results[0]["weights"])


def test_plain_spawn_gives_the_same_weights(tmp_path, monkeypatch):
    path = str(tmp_path / "spawn.pt")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    mp.spawn(train_one_epoch, args=(2, path), nprocs=2)
    assert equal(saved(path), ddp_lab.launch(train, epochs=1, **QUIET).results[0]["weights"])


def train_one_epoch(rank, world_size, path):
    train(rank, world_size, epochs=1, checkpoint=path)


def test_a_function_call_in_this_process_works_too():
    result = train(0, 1, epochs=1)
    assert result["accuracy"] > 0.8
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("resnet", 1, 64), "model='resnet' is not in the lab: use 'simplenet' or 'convnet'"),
        (("convnet", 0, 64), "epochs=0 trains nothing"),
        (("convnet", 1, 0), "per_rank_batch_size=0 is no batch"),
    ],
)
def test_options_that_cannot_work_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        check_options(*options)


def test_the_terminal_command_prints_per_rank_losses_and_accuracy():
    out = command("ddp_lab", "--epochs", "1", "--world-size", "3").splitlines()
    assert out[0].startswith("[rank 0] backend ")
    assert [line.split(":")[0] for line in out[1:4]] == ["rank 0", "rank 1", "rank 2"]
    assert out[4].startswith("all ranks: loss per epoch") and out[5].startswith("accuracy on held-out images: 0.")


@pytest.mark.parametrize(("option", "value"), [("--world-size", "0"), ("--epochs", "0")])
def test_the_terminal_command_refuses_in_one_line(option, value):
    done = subprocess.run([sys.executable, "-m", "ddp_lab", option, value], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1 and f"={value} " in done.stderr
