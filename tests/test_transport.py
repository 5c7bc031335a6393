import pickle
import threading

import pytest
import torch

from ddp_lab import transport


def takes(rank, world_size, config=None, **more):
    return config


def packed(*args, **kwargs):
    return pickle.loads(transport.pack_job(takes, args, kwargs))


def test_a_call_survives():
    fn, args, kwargs = packed(3, lr=0.1)
    assert (fn, args, kwargs) == (takes, (3,), {"lr": 0.1})


def test_functions_and_classes_of_a_cell_travel_by_value_with_their_file_name():
    namespace = {"__name__": "__main__"}
    source = (
        "class Box:\n    size = 3\n\n"
        "def make(factor):\n    def inner():\n        return factor * Box.size\n    return inner"
    )
    exec(compile(source, "cell-7", "exec"), namespace)
    inner = pickle.loads(transport.dumps(namespace["make"](5)))
    assert inner() == 15
    assert inner.__code__.co_filename == "cell-7"
    assert pickle.loads(transport.dumps(namespace["make"])).__code__.co_consts[1].co_filename == "cell-7"


@pytest.mark.parametrize(
    ("config", "culprit"),
    [
        (threading.Lock(), "config can't be sent to the ranks, because a lock"),
        ({"data": [1, threading.Lock()]}, r"config\['data'\]\[1\] can't be sent"),
        ((i for i in range(3)), "config can't be sent to the ranks, because a generator"),
    ],
)
def test_what_cannot_travel_is_named_with_its_path(config, culprit):
    with pytest.raises(TypeError, match=culprit):
        transport.pack_job(takes, (config,), {})
    with pytest.raises(TypeError, match=culprit):
        transport.pack_job(takes, (), {"config": config})


def test_a_global_that_cannot_travel_is_named():
    namespace = {"__name__": "__main__", "lock": threading.Lock()}
    exec("def fn(rank, world_size):\n    with lock:\n        return rank", namespace)
    with pytest.raises(TypeError, match="'lock', which fn uses, can't be sent"):
        transport.pack_job(namespace["fn"], (), {})


def test_a_result_that_cannot_come_back_is_named():
    with pytest.raises(TypeError, match=r"rank 3 finished, but its result\['f'\] is a generator.*return numbers"):
        transport.pack_result(3, {"f": (i for i in range(3))})


def test_a_result_that_is_too_large_is_refused_with_its_size(monkeypatch):
    monkeypatch.setattr(transport, "MAX_RESULT_BYTES", 1000)
    with pytest.raises(TypeError, match=r"rank 0 finished, but its result is .* GiB .*: save it to a file"):
        transport.pack_result(0, torch.zeros(1000))


def test_tensors_come_back_without_their_graph():
    weight = torch.ones(3, requires_grad=True)
    loss, kept = pickle.loads(transport.pack_result(0, ((weight * 2).sum(), weight)))
    assert loss.item() == 6 and not loss.requires_grad
    assert kept.is_leaf and kept.requires_grad


def test_models_come_back_usable():
    model = torch.nn.Linear(2, 1)
    again = pickle.loads(transport.pack_result(0, model))
    assert torch.equal(again.weight, model.weight)
    again(torch.ones(1, 2)).sum().backward()


def test_a_cells_text_can_be_shown_in_another_process(monkeypatch):
    import linecache

    monkeypatch.setattr(linecache, "cache", {"cell-1": (4, None, ["x=1\n"], "cell-1"), __file__: (1, 1.0, ["no"], "")})
    sources = transport.cell_sources()
    assert sources == {"cell-1": ["x=1\n"]}
    linecache.cache.clear()
    transport.add_sources(sources)
    assert linecache.getline("cell-1", 1) == "x=1\n"


def test_a_view_travels_without_the_rest_of_its_tensor():
    packed = transport.dumps(torch.zeros(1_000_000)[:2])
    assert len(packed) < 10_000 and pickle.loads(packed).tolist() == [0, 0]


class Fragile(Exception):
    def __init__(self, one, two):
        super().__init__(one)


def test_what_pickles_but_cannot_be_rebuilt_is_refused_in_a_sentence():
    packed = transport.dumps(Fragile(1, 2))
    with pytest.raises(transport.Refusal, match=r"rank 1 finished, but its result can't be rebuilt .*: return numbers"):
        transport.unpack_result(1, packed)
    with pytest.raises(transport.Refusal, match="rank 1 could not rebuild the function or an argument"):
        transport.unpack_job(1, packed)
