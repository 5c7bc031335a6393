"""Where the ranks' sequences of collectives part. Pure: what `tracing` recorded in, the first difference out.

A process group has no names for its calls: the first call of one rank meets the first call of every other, whatever
they are. So the calls of a group are compared by their place in the sequence.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from ddp_lab.phases import PHASE
from ddp_lab.stacks import place
from ddp_lab.tracing import GRADIENTS, POINT_TO_POINT, WRAPPER, Collective

SAME_CALLS = "let every rank make the same collective calls in the same order, with the same arguments"
SAME_TENSORS = "give every rank the same shape and dtype"
SAME_STEPS = (
    "let every rank make the same number of steps: DistributedSampler deals equal parts, model.join() allows unequal "
    "ones, and a decision to stop must be the same on all ranks, for instance from an all_reduce"
)
SAME_GROUPS = "let every rank use its process groups in the same order"
SEND_FIRST = "let one of them send before it receives"
LONGER_PHASE = "give rank0_phase a longer timeout, or share the work among the ranks"
WHOLE_MODEL = "call the wrapped model on every rank, or model.module where only some ranks compute"
OWN_SIZE = ("scatter", "all_to_all")  # whose ranks may bring different sizes
MAY_DIFFER = (*OWN_SIZE, "all_gather", "gather")  # where a backend that allows it does nothing wrong

Calls = dict[int, list[Collective]]


@dataclass(frozen=True)
class Parting:
    """Two ranks' calls that met and do not fit. call: of the rank to blame; other: what it should have been."""

    call: Collective
    other: Collective


def first_parting(calls: Calls, tolerant: bool = False) -> Parting | None:
    """Return the first calls that met and differ: in the collective, its root, the dtype or the number of elements.

    Of three ranks or more the one that is alone is blamed; of two the one that called the wrapped model where the
    other did not, else the one with the higher number. tolerant: leave out differences that some backend allows.
    """
    for met in _meetings(calls):
        by_kind: dict[tuple, list[Collective]] = {}
        for call in met:
            by_kind.setdefault(_kind(call, tolerant), []).append(call)
        if len(by_kind) > 1:
            usual = max(by_kind.values(), key=lambda same: (len(same), same[0].within != WRAPPER, -same[0].rank))
            odd = next(call for call in met if call not in usual)
            return Parting(odd, usual[0])
    return None


def _meetings(calls: Calls) -> Iterator[list[Collective]]:
    """Yield what met in each group, call by call, in rank order."""
    in_order = sorted(
        (call for each in calls.values() for call in each if call.op not in POINT_TO_POINT),
        key=lambda call: (call.group, call.seq, call.rank),
    )
    for _, met in groupby(in_order, key=lambda call: (call.group, call.seq)):
        yield list(met)


def _kind(call: Collective, tolerant: bool) -> tuple:
    if call.op in (MAY_DIFFER if tolerant else OWN_SIZE):
        return call.op, call.root
    return call.op, call.root, call.dtype, call.elements


def unfinished(calls: list[Collective]) -> Collective | None:
    """The latest call of a rank that has not ended, or ended in an error."""
    return next((call for call in reversed(calls) if call.end is None), None)


def missing(call: Collective, calls: Calls) -> list[int]:
    """The ranks of the call's group that have not made it; for a send or recv, nothing is known."""
    if call.op in POINT_TO_POINT:
        return []
    members = call.ranks or sorted(calls)
    return [rank for rank in members if _last_seq(calls.get(rank, []), call.group) < call.seq]


def _last_seq(calls: list[Collective], group: str) -> int:
    return max((call.seq for call in calls if call.group == group), default=0)


def left_out(calls: Calls) -> tuple[int, Collective] | None:
    """In a run without an error: a rank that made fewer calls than another, and the first call that it left out.

    A broadcast does not wait for those who listen, so this can go unnoticed.
    """
    for met in _meetings(calls):
        absent = missing(met[0], calls)
        whole_group = [call for each in calls.values() for call in each if call.group == met[0].group]
        if absent and all(call.end is not None for call in whole_group):
            return absent[0], met[0]
    return None


def said(call: Collective, names: dict[str, str]) -> str:
    """Name a call: the collective, what of, and the learner's line."""
    of = f" of {call.shape} {call.dtype}" if call.dtype else ""
    if call.root >= 0:
        of = f" {'to' if call.op in ('reduce', 'gather', 'send') else 'from'} rank {call.root}{of}"
    at = place([call.place], names) if call.place else ""
    if call.within == GRADIENTS:
        return f"backward, where DDP averages gradients ({call.op}{of}){at}"
    if call.within == WRAPPER:
        return f"the DDP wrapper ({call.op}{of}){at}"
    return f"{call.name}{of}{at}"


def tally(call: Collective, calls: Calls) -> str:
    """Say how often each rank made this call, where that differs: " (backward passes so far: rank 0: 3, rank 1: 4)"."""
    counts = {rank: _times(call, each) for rank, each in sorted(calls.items())}
    if len(set(counts.values())) == 1 or max(counts.values()) < 2:
        return ""
    what = "backward passes" if call.within == GRADIENTS else "calls of that line"
    return f" ({what} so far: {', '.join(f'rank {rank}: {count}' for rank, count in counts.items())})"


def _times(call: Collective, calls: list[Collective]) -> int:
    def kind(one: Collective) -> tuple:
        return one.group, one.op, one.within, one.file, one.line, one.elements

    return max((each.nth for each in calls if kind(each) == kind(call)), default=0)


def cure(call: Collective, other: Collective | None, calls: Calls) -> str:
    """The cure of a call that did not meet its like."""
    if other is not None and (call.op, call.root, call.within) == (other.op, other.root, other.within):
        return SAME_TENSORS
    both = [each for each in (call, other) if each is not None]
    if any(each.within == GRADIENTS and tally(each, calls) for each in both):
        return SAME_STEPS
    if any(each.within == WRAPPER for each in both):
        return WHOLE_MODEL
    return SAME_CALLS


def phase(call: Collective) -> str:
    """The name of the `rank0_phase` at whose end a call waits, or ""."""
    return call.group.partition(PHASE)[2]


def cure_of_waiting(call: Collective, others: list[Collective], calls: Calls) -> str:
    """The cure of a call that waits; others: the calls in which the awaited ranks wait themselves."""
    if phase(call):
        return LONGER_PHASE
    if call.op == "recv" and any(other.op == "recv" for other in others):
        return SEND_FIRST
    if any(other.group != call.group for other in others):
        return SAME_GROUPS
    return cure(call, None, calls)
