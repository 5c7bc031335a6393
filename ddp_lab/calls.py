"""What can be seen to be wrong with a call of `launch` before any process starts."""

import inspect
import math
import numbers
import operator
import os
from collections.abc import Callable
from typing import Any

import psutil

from ddp_lab.devices import choose_backend
from ddp_lab.transport import fn_name

BYTES_PER_RANK = 300 << 20  # an idle rank's; it is the bound for a slip of the keyboard, not advice
LONGEST_SECONDS = 7 * 24 * 3600.0  # beyond it the backends' own arithmetic overflows
OWN_OPTIONS = ("world_size", "timeout", "on_event")


def shown_in_one_line(error: Exception) -> Exception:
    """Let IPython show an error of the learner's call without the lab's own traceback."""
    error._render_traceback_ = lambda: [f"{type(error).__name__}: {error}"]
    return error


def check(
    fn: Any, args: tuple, kwargs: dict[str, Any], world_size: Any, timeout: Any, on_event: Any
) -> tuple[int, float | None]:
    """Return (world_size, timeout), as an int and as seconds or None.

    Raises TypeError or ValueError for a call that can't work: one sentence that names the culprit and the cure.
    """
    if not callable(fn):
        raise TypeError(f"launch needs a function, and got {_shown(fn)}: write launch(train), not launch(train())")
    world_size = _checked_world_size(world_size)
    timeout = _checked_timeout(timeout)
    if not (callable(on_event) or on_event in (None, "auto")):
        raise TypeError(f"on_event={on_event!r} is neither a function, nor None, nor 'auto': use one of these")
    try:
        os.getcwd()
    except FileNotFoundError:
        raise ValueError("the current folder was deleted, and ranks can't start in it: use os.chdir first") from None
    _check_signature(fn, args, kwargs, world_size)
    return world_size, timeout


def _checked_world_size(world_size: Any) -> int:
    try:
        ranks = operator.index(world_size)
    except TypeError:
        raise TypeError(f"world_size={world_size!r} is not a whole number: use 1, 2 or more ranks") from None
    if ranks < 1:
        raise ValueError(f"world_size={ranks} starts no rank: use 1 or more")
    total = psutil.virtual_memory().total
    if ranks > 1 and ranks * BYTES_PER_RANK > total:
        raise ValueError(
            f"world_size={ranks} needs about {ranks * BYTES_PER_RANK / 2**30:.0f} GiB of memory and this machine has "
            f"{total / 2**30:.0f}: use at most {max(1, total // BYTES_PER_RANK)} ranks"
        )
    return ranks


def _checked_timeout(timeout: Any) -> float | None:
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, numbers.Real) or not timeout >= 0.01:
        raise ValueError(f"timeout={timeout!r} is no number of seconds from 0.01 on: give one, or None for no limit")
    return None if math.isinf(timeout) or timeout > LONGEST_SECONDS else float(timeout)


def _check_signature(fn: Callable[..., Any], args: tuple, kwargs: dict[str, Any], world_size: int) -> None:
    name = fn_name(fn)
    if any(map(_is_no_plain_call, (fn, getattr(fn, "__call__", fn)))):  # noqa: B004 (an object's own call)
        raise TypeError(f"{name} is a generator or async function, which a plain call does not run: use a plain def")
    try:
        signature = inspect.signature(fn)
    except ValueError:
        return  # some functions written in C have none to look at
    try:
        bound = signature.bind(0, world_size, *args, **kwargs)
    except TypeError as error:
        given = ["rank", "world_size", *map(_shown, args), *(f"{key}={_shown(value)}" for key, value in kwargs.items())]
        taken = [option for option in OWN_OPTIONS[1:] if option in signature.parameters and option not in kwargs]
        cure = (
            f"rename its {taken[0]}, which launch keeps for itself"
            if taken
            else "let its first two parameters take rank and world_size"
        )
        raise TypeError(
            f"each rank would call {name}({', '.join(given)}), but the function is {name}{signature} ({error}): {cure}"
        ) from None
    backend = bound.arguments.get("backend")
    if isinstance(backend, str):
        choose_backend(world_size, backend)


def _is_no_plain_call(fn: Any) -> bool:
    return inspect.isgeneratorfunction(fn) or inspect.iscoroutinefunction(fn) or inspect.isasyncgenfunction(fn)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 40 else text[:37] + "…"
