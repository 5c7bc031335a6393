"""DDP Lab: learn distributed data-parallel training with PyTorch, in notebooks, with real processes.

Names are loaded on first use, so that a spawned rank imports only what its function needs, and nothing that draws.
"""

import importlib
import sys
from types import ModuleType

_HOME = {
    "ConvNet": "models",
    "Event": "events",
    "EventLog": "events",
    "Interrupted": "diagnosis",
    "RankError": "diagnosis",
    "Run": "launcher",
    "SimpleNet": "models",
    "doctor": "doctor",
    "fast_start": "launcher",
    "hello": "hello",
    "launch": "launcher",
    "log": "events",
    "mnist": "data",
    "prepare_data": "data",
    "rank0_phase": "phases",
    "shard": "data",
    "train": "train",
}
__all__ = sorted(_HOME)
__version__ = "0.1.0"


class _Package(ModuleType):
    """`train`, `doctor` and `hello` name a module and its function: here, as an attribute, the function wins."""

    def __setattr__(self, name, value):
        is_its_module = isinstance(value, ModuleType) and _HOME.get(name) == name
        super().__setattr__(name, getattr(value, name) if is_its_module else value)

    def __reduce__(self):
        return importlib.import_module, (self.__name__,)  # pickle knows plain modules only


sys.modules[__name__].__class__ = _Package


def __getattr__(name):
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__():
    return sorted({*globals(), *__all__})
