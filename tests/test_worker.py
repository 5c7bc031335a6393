"""What a rank does for itself; tests/test_launcher.py sees it at work."""

import multiprocessing
import os
import pickle
import random
import threading

import numpy as np
import pytest
import torch

import ddp_lab
from ddp_lab import tracing, worker

QUIET = {"on_event": None}


@pytest.fixture(autouse=True)
def _fast(fast):
    yield


def test_a_rank_is_not_held_up_by_a_notebook_that_does_not_read():
    ours, theirs = multiprocessing.Pipe()
    reporter = worker.Reporter(theirs, tracing.Trace(0))
    for step in range(3 * worker.MAX_WAITING_EVENTS):
        reporter.event("metrics", {"step": step})
    assert len(reporter.waiting) <= worker.MAX_WAITING_EVENTS
    ours.close()  # which ends the reporter's thread


def test_the_last_word_comes_after_every_event():
    ours, theirs = multiprocessing.Pipe()
    reporter = worker.Reporter(theirs, tracing.Trace(0))
    reporter.event("metrics", {"step": 1})
    reporter.close("done", b"result")
    tags = [pickle.loads(ours.recv_bytes())[0] for _ in range(2)]
    assert tags == ["events", "done"]
    ours.close()  # which ends the reporter's thread


def test_an_error_is_described_with_its_cause_and_without_the_labs_frames():
    def inner():
        try:
            return 1 / 0
        except ZeroDivisionError as error:
            raise ValueError("no number") from error

    try:
        inner()
    except ValueError as error:
        described = worker.describe(error)
    assert (described["type"], described["message"]) == ("ValueError", "no number")
    assert [frame[2] for frame in described["frames"]][-1] == "inner"
    assert described["cause"]["type"] == "ZeroDivisionError"
    assert pickle.loads(pickle.dumps(described)) == described


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError


def test_an_error_that_cannot_be_printed_is_still_described():
    assert worker.describe(Unprintable())["message"] == "(its message can't be shown)"


def chain_of(length):
    error = None
    for number in range(length):
        new = ValueError(number)
        new.__cause__ = error
        error = new
    return error


def group_with_a_note():
    group = ExceptionGroup("two things", [ValueError("one"), KeyError("two")])
    group.add_note("look twice")
    return group


def circle():
    one, two = ValueError("one"), ValueError("two")
    one.__cause__, two.__cause__ = two, one
    return one


@pytest.mark.parametrize("error", [chain_of(1000), circle(), SystemExit(threading.Lock()), group_with_a_note()])
def test_every_error_can_be_described_and_sent(error):
    assert len(pickle.dumps(worker.describe(error))) < 100_000


def test_notes_and_members_of_a_group_are_described():
    notes = worker.describe(group_with_a_note())["notes"]
    assert notes == ["look twice", "contains ValueError: one", "contains KeyError: 'two'"]


def draws(rank, world_size):
    return (
        random.random(),
        np.random.rand(),
        torch.rand(1).item(),
        torch.get_num_threads(),
        multiprocessing.get_start_method(),
    )


def test_a_rank_is_a_fresh_process_also_when_it_was_forked():
    first, second = ddp_lab.launch(draws, **QUIET).results
    again = ddp_lab.launch(draws, **QUIET).results[0]
    assert first[0] != second[0] != again[0]
    assert first[1] != second[1] != again[1]
    assert first[2] == second[2] == again[2]  # PyTorch's own default seed is one constant
    assert first[3:] == (1, multiprocessing.get_context().get_start_method())


def ends_in_its_own_group(rank, world_size):
    return os.getpid() == os.getpgrp()


def test_a_rank_leads_a_group_of_its_own():
    assert ddp_lab.launch(ends_in_its_own_group, **QUIET).results == [True, True]
