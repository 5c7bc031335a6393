"""What travels between the notebook and its ranks, and a plain word about what can't.

Functions and classes from cells exist in the notebook's process only, so they travel by value (cloudpickle). Tensors
travel as copies: a rank never shares memory with the notebook, and what it returns is usable after the rank is gone.
"""

import inspect
import io
import linecache
import os
import pickle
import sys
import types
from collections import ChainMap
from collections.abc import Iterator
from typing import Any, ClassVar

import cloudpickle
import torch

MAX_RESULT_BYTES = 1 << 30
MAX_SOURCE_BYTES = 1 << 20


class Refusal(TypeError):
    """Something that can't travel. `refusal`: why, and the cure."""

    def __init__(self, why: str, cure: str):
        super().__init__(f"{why}: {cure}")
        self.refusal = why, cure


class _Pickler(cloudpickle.Pickler):
    """Send tensors without their graph, and a model without the DDP wrapper that needs a process group to exist.

    A view of a large tensor travels without the rest of it, so views of one tensor arrive as separate tensors.
    """

    dispatch_table: ClassVar = ChainMap(
        {types.CodeType: lambda code: _reduce_code(code)}, cloudpickle.Pickler.dispatch_table
    )

    def reducer_override(self, obj):
        if isinstance(obj, torch.nn.parallel.DistributedDataParallel):
            return _same, (obj.module,)
        if type(obj) in (torch.Tensor, torch.nn.Parameter) and _needs_a_copy(obj):
            copy = obj.detach().cpu().clone()
            return _same, (copy if type(obj) is torch.Tensor else torch.nn.Parameter(copy, obj.requires_grad),)
        return super().reducer_override(obj)


class _ResultPickler(_Pickler):
    """Also send a class that came from the notebook by its name there.

    By value, it would overwrite the notebook's class with what the rank has made of it.
    """

    def reducer_override(self, obj):
        if isinstance(obj, type):
            tracker = cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_CLASS.get(obj)
            if tracker in _from_the_notebook:
                return _notebooks_class, (tracker,)
        return super().reducer_override(obj)


_from_the_notebook: set[str] = set()


def _notebooks_class(tracker: str) -> type:
    return cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID[tracker]


def _needs_a_copy(tensor: torch.Tensor) -> bool:
    if tensor.grad_fn is not None or tensor.device.type != "cpu":
        return True
    return tensor.layout is torch.strided and tensor.untyped_storage().nbytes() > 2 * tensor.nbytes


def _reduce_code(code: types.CodeType):
    """Keep the file name, which cloudpickle drops: without it no traceback could show the cell's line."""
    return _build_code, (code.co_filename, *cloudpickle.Pickler.dispatch_table[types.CodeType](code)[:2])


def _build_code(file: str, build, parts: tuple) -> types.CodeType:
    return build(*parts).replace(co_filename=file)


def _same(obj: Any) -> Any:
    return obj


def dumps(obj: Any, pickler: type[_Pickler] = _Pickler) -> bytes:
    """Pickle by value what other processes can't import. Raises whatever pickling raises."""
    buffer = io.BytesIO()
    pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(obj)
    return buffer.getvalue()


def pack_job(fn, args: tuple, kwargs: dict[str, Any]) -> bytes:
    """Pickle a call. Raises Refusal, a TypeError, that names the part which can't travel, and the cure."""
    try:
        return dumps((fn, args, kwargs))
    except Exception as error:
        parts = {fn_name(fn): fn, **dict(zip(_argument_names(fn), args, strict=False)), **kwargs}
        name, culprit = next(_culprits(parts), (fn_name(fn), fn))
        raise Refusal(
            f"{name} can't be sent to the ranks, because a {type(culprit).__name__} can't be pickled ({error})",
            f"create it inside {fn_name(fn)}, or pass what it is made from",
        ) from error


def unpack_job(rank: int, packed: bytes) -> tuple[Any, tuple, dict[str, Any]]:
    """Return (fn, args, kwargs) in a rank. Raises Refusal when something pickles but can't be rebuilt."""
    try:
        job = pickle.loads(packed)
    except Exception as error:
        raise Refusal(
            f"rank {rank} could not rebuild the function or an argument ({type(error).__name__}: {error})",
            "pass plain values, and build the object inside the function",
        ) from error
    _from_the_notebook.update(cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID)
    return job


def _argument_names(fn) -> list[str]:
    try:
        return [*inspect.signature(fn).parameters][2:]
    except ValueError:
        return [f"argument {place}" for place in range(3, 20)]


def pack_result(rank: int, result: Any) -> bytes:
    """Pickle what a rank returns. Raises Refusal that names the culprit and the cure."""
    try:
        packed = dumps(result, _ResultPickler)
    except Exception as error:
        name, culprit = next(_culprits({"its result": result}), ("its result", result))
        raise Refusal(
            f"rank {rank} finished, but {name} is a {type(culprit).__name__}, which can't be pickled ({error})",
            "return numbers, tensors, or a state_dict",
        ) from error
    if len(packed) > MAX_RESULT_BYTES:
        raise Refusal(
            f"rank {rank} finished, but its result is {len(packed) / 2**30:.1f} GiB and at most "
            f"{MAX_RESULT_BYTES / 2**30:.0f} GiB can come back",
            "save it to a file and return the path",
        )
    return packed


def unpack_result(rank: int, packed: bytes) -> Any:
    """Return what a rank returned. Raises Refusal when it can't be rebuilt here."""
    try:
        return pickle.loads(packed)
    except Exception as error:
        raise Refusal(
            f"rank {rank} finished, but its result can't be rebuilt in the notebook ({type(error).__name__}: {error})",
            "return numbers, tensors, or a state_dict",
        ) from error


def fn_name(fn: Any) -> str:
    """The name that a learner knows a callable by."""
    return getattr(fn, "__name__", None) or type(fn).__name__


def _culprits(parts: dict[str, Any], depth: int = 6) -> Iterator[tuple[str, Any]]:
    """Yield (path, object) of the innermost parts that can't be pickled, for example ("config['hook']", <lock>)."""
    for name, part in parts.items():
        try:
            dumps(part)
        except Exception:
            inner = _culprits(_parts(name, part), depth - 1) if depth else iter(())
            yield next(inner, (name, part))


def _parts(name: str, obj: Any) -> dict[str, Any]:
    if isinstance(obj, dict):
        return {f"{name}[{key!r}]": value for key, value in obj.items()}
    if isinstance(obj, list | tuple | set):
        return {f"{name}[{place}]": value for place, value in enumerate(obj)}
    if inspect.isfunction(obj):
        found = inspect.getclosurevars(obj)
        return {f"{key!r}, which {name} uses,": value for key, value in {**found.globals, **found.nonlocals}.items()}
    return {f"{name}.{key}": value for key, value in getattr(obj, "__dict__", {}).items()}


def cell_sources() -> dict[str, list[str]]:
    """The text of cells that ran in this notebook, by file name, so that a rank's traceback can show their lines."""
    found, size = {}, 0
    for file, entry in reversed(list(linecache.cache.items())):
        if len(entry) == 4 and entry[1] is None and not os.path.exists(file):
            size += entry[0]
            if size > MAX_SOURCE_BYTES:
                break
            found[file] = entry[2]
    return found


def add_sources(sources: dict[str, list[str]]) -> None:
    """Make `cell_sources` of the notebook known in this process."""
    for file, lines in sources.items():
        linecache.cache[file] = (sum(map(len, lines)), None, lines, file)


def cell_names() -> dict[str, str]:
    """The name that the notebook shows for a cell's file, for example "Cell In[5]", by file name."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    known = getattr(getattr(shell, "compile", None), "_filename_map", {})
    return {file: f"Cell In[{count}]" for file, count in known.items()}
