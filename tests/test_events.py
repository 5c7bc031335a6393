import json
import subprocess
import sys

import numpy as np
import pytest
import torch

from ddp_lab import events
from ddp_lab.events import Event, EventLog, log


@pytest.fixture
def logged(monkeypatch):
    received = []
    monkeypatch.setattr(events, "_sink", lambda kind, data: received.append((kind, data)))
    return received


def sample_log():
    return EventLog(
        [
            Event(0, 1.0, "starting"),
            Event(0, 2.0, "metrics", {"step": 10, "loss": 0.5}),
            Event(1, 2.5, "metrics", {"step": 10, "loss": 0.7, "note": "first"}),
            Event(0, 3.0, "metrics", {"step": 20, "loss": 0.25}),
        ]
    )


def test_series_of_one_rank():
    assert sample_log().series("loss", 0) == ([10, 20], [0.5, 0.25])
    assert sample_log().series("loss", 2) == ([], [])


def test_series_counts_where_no_step_was_logged():
    log_without_steps = EventLog([Event(0, 1.0, "metrics", {"loss": value}) for value in (3.0, 2.0)])
    assert log_without_steps.series("loss", 0) == ([0, 1], [3.0, 2.0])


def test_ranks_and_metrics_are_sorted():
    assert sample_log().ranks() == [0, 1]
    assert sample_log().metrics() == ["loss", "note"]


def test_save_and_load_give_the_same_events(tmp_path):
    path = tmp_path / "run.jsonl"
    sample_log().save(path)
    assert EventLog.load(path).events == sample_log().events
    assert [json.loads(line)["rank"] for line in path.read_text().splitlines()] == [0, 0, 1, 0]


def test_a_broken_file_is_refused_by_file_and_line(tmp_path):
    path = tmp_path / "run.jsonl"
    sample_log().save(path)
    path.write_text(path.read_text() + '{"rank": 0}\n')
    with pytest.raises(ValueError, match=r"run\.jsonl, line 5 is not an event"):
        EventLog.load(path)


def test_log_reads_tensors_of_one_element_and_numpy_numbers(logged):
    loss = torch.tensor([2.5], requires_grad=True)
    log(step=1, loss=loss.sum(), share=np.float64(0.5), name="a")
    assert logged == [("metrics", {"step": 1, "loss": 2.5, "share": 0.5, "name": "a"})]
    assert [type(value) for value in logged[0][1].values()] == [int, float, float, str]


def test_log_refuses_several_elements_by_name_and_shape(logged):
    with pytest.raises(TypeError, match=r"log\(loss=…\).*shape \(2, 3\).*mean\(\)"):
        log(loss=torch.zeros(2, 3))
    assert logged == []


def test_log_keeps_the_text_of_what_is_no_number(logged):
    log(hook=print, values=[1, 2], nothing=None)
    assert logged == [("metrics", {"hook": "<built-in function print>", "values": "[1, 2]", "nothing": None})]


def test_a_value_that_cannot_be_read_later_does_not_stop_the_others(logged):
    log(loss=torch.zeros((), device="meta"), step=3)
    assert events.plain(logged[0][1]) == {"loss": "not readable (RuntimeError)", "step": 3}


def test_log_does_not_read_a_tensor_of_another_device(logged):
    """`meta` stands for a GPU here: reading its value would raise, as reading a GPU's would wait."""
    log(loss=torch.zeros((), device="meta"))
    assert logged[0][1]["loss"].device.type == "meta"


def test_a_plain_call_prints_a_line_but_not_one_for_every_step():
    code = "import ddp_lab; [ddp_lab.log(step=step, loss=step / 3) for step in range(1000)]"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    lines = done.stderr.splitlines()
    assert lines[0] == "[rank 0] step 0, loss 0"
    assert len(lines) < 10
