import pytest
import torch

from ddp_lab.models import MODELS, SimpleNet, fingerprint


@pytest.mark.parametrize("name", MODELS)
def test_images_in_scores_out(name):
    assert MODELS[name]()(torch.zeros(3, 1, 28, 28)).shape == (3, 10)


def test_simple_net_is_one_linear_layer():
    assert {name: tuple(p.shape) for name, p in SimpleNet().named_parameters()} == {
        "linear.weight": (10, 784),
        "linear.bias": (10,),
    }


def test_fingerprint_names_equal_bits_only():
    one, other = SimpleNet(), SimpleNet()
    assert fingerprint(one) != fingerprint(other)
    other.load_state_dict(one.state_dict())
    assert fingerprint(one) == fingerprint(other)
    with torch.no_grad():
        other.linear.bias[0] = torch.nextafter(other.linear.bias[0], torch.tensor(9.0))
    assert fingerprint(one) != fingerprint(other)


def test_fingerprint_sees_buffers_and_every_dtype():
    model = torch.nn.BatchNorm1d(2).to(torch.bfloat16)
    before = fingerprint(model)
    model.num_batches_tracked += 1
    assert fingerprint(model) != before
