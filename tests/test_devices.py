import pytest
import torch
import torch.distributed as dist

from ddp_lab.devices import choose_backend, device_for


def with_gpus(monkeypatch, count, nccl=True):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: nccl)


def test_nccl_where_there_is_a_gpu_per_rank(monkeypatch):
    with_gpus(monkeypatch, 2)
    assert choose_backend(2) == ("nccl", "this machine has 2 GPUs for 2 ranks")
    assert device_for(1, "nccl") == torch.device("cuda", 1)


@pytest.mark.parametrize("gpus", [0, 1])
def test_gloo_where_there_are_fewer_gpus_than_ranks(monkeypatch, gpus):
    with_gpus(monkeypatch, gpus)
    assert choose_backend(2) == ("gloo", f"this machine has {gpus} GPU{'s' * (gpus != 1)} for 2 ranks")
    assert device_for(1, "gloo") == torch.device("cpu")


def test_gloo_says_so_when_pytorch_has_no_nccl(monkeypatch):
    with_gpus(monkeypatch, 2, nccl=False)
    assert choose_backend(2) == ("gloo", "this machine has 2 GPUs for 2 ranks, but this PyTorch was built without NCCL")


def test_a_backend_that_this_machine_lacks_is_refused_with_the_cure(monkeypatch):
    with_gpus(monkeypatch, 1)
    with pytest.raises(
        ValueError, match="one GPU per rank, and this machine has 1 GPU for 2 ranks: use backend='gloo'"
    ):
        choose_backend(2, "nccl")
    with_gpus(monkeypatch, 2, nccl=False)
    with pytest.raises(ValueError, match="built with NCCL"):
        choose_backend(2, "nccl")
    with pytest.raises(ValueError, match="'mpi' is not one that the lab knows"):
        choose_backend(2, "mpi")


def test_gloo_when_asked_for_despite_gpus(monkeypatch):
    with_gpus(monkeypatch, 8)
    assert choose_backend(2, "gloo")[0] == "gloo"
