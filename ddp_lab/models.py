"""The two networks of the course, and a short name for a replica's weights."""

import hashlib

import torch
from torch import nn


class SimpleNet(nn.Module):
    """One linear layer, 784 → 10: images (batch, 1, 28, 28) in, scores (batch, 10) out."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(784, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.linear(images.flatten(1))


class ConvNet(nn.Module):
    """Two small convolutions and a linear layer: images (batch, 1, 28, 28) in, scores (batch, 10) out."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 8, kernel_size=5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 16, kernel_size=5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(16 * 7 * 7, 10),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.layers(images)


MODELS = {"simplenet": SimpleNet, "convnet": ConvNet}


def fingerprint(model: nn.Module) -> str:
    """Return 8 hex digits that name a model's weights and buffers: equal bits, equal name."""
    digest = hashlib.blake2b(digest_size=4)
    for name, tensor in model.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
