"""Starting and ending processes, without a notebook."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
from conftest import pids_gone

from ddp_lab import processes

SCRIPT = """
import ddp_lab, os

def fn(rank, world_size):
    return rank + 10

print(ddp_lab.launch(fn, world_size=1, on_event=None).results)
"""
SLEEPING_SCRIPT = """
import ddp_lab, os, pathlib, sys, time

def fn(rank, world_size, folder):
    (pathlib.Path(folder) / str(os.getpid())).touch()
    time.sleep(1000)

ddp_lab.launch(fn, sys.argv[1], on_event=None)
"""


def ranks_in(folder):
    """Wait until SLEEPING_SCRIPT's two ranks have left their pids."""
    deadline = time.monotonic() + 30
    while len(pids := [int(file.name) for file in folder.iterdir()]) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return pids


@pytest.mark.parametrize("how", ["file without a __main__ guard", "-c", "standard input"])
def test_launch_works_from_every_kind_of_program(how, tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    arguments = {"-c": ["-c", SCRIPT], "standard input": ["-"]}.get(how, [str(path)])
    done = subprocess.run([sys.executable, *arguments], input=SCRIPT, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("[10]\n", "")


def test_fast_start_goes_through_the_same_path(tmp_path):
    script = SCRIPT.replace("import ddp_lab, os", "import ddp_lab\nddp_lab.fast_start()\nddp_lab.fast_start()")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("[10]\n", "")


def test_a_script_that_is_ended_takes_its_ranks_with_it(tmp_path):
    program = subprocess.Popen([sys.executable, "-c", SLEEPING_SCRIPT, str(tmp_path)])
    pids = ranks_in(tmp_path)
    program.terminate()
    program.wait()
    assert pids_gone(pids)


def test_a_terminal_that_is_closed_ends_the_program_and_its_ranks(tmp_path):
    master, terminal = os.openpty()
    script = "import fcntl, termios\nfcntl.ioctl(0, termios.TIOCSCTTY, 0)\n" + SLEEPING_SCRIPT
    command = [sys.executable, "-c", script, str(tmp_path)]
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), terminal)
    program = subprocess.Popen(command, start_new_session=True, **streams)
    os.close(terminal)
    pids = ranks_in(tmp_path)
    os.close(master)
    assert program.wait(timeout=10) == -signal.SIGHUP
    assert pids_gone(pids)


def in_a_network(lines):
    """Run SCRIPT's two ranks in a network of their own, after the lines."""
    script = lines + SCRIPT.replace("world_size=1", "world_size=2").replace("return rank + 10", ADDS)
    command = ["unshare", "--map-root-user", "--net", sys.executable, "-c", script]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


ADDS = """
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    tensor = torch.tensor([float(rank)])
    dist.all_reduce(tensor)
    return tensor.item()"""
LOOPBACK_ON = """
import fcntl, socket, struct
fcntl.ioctl(socket.socket(socket.AF_INET, socket.SOCK_DGRAM), 0x8914, struct.pack("16sh14x", b"lo", 0x41))
"""


@pytest.mark.skipif(not shutil.which("unshare"), reason="needs unshare, which is Linux's")
def test_no_network_at_all_does_no_harm():
    done = in_a_network(LOOPBACK_ON)
    if "unshare failed" in done.stderr:
        pytest.skip("this system lets no program make a network")
    assert (done.stdout, done.stderr) == ("[1.0, 1.0]\n", "")


@pytest.mark.skipif(not shutil.which("unshare"), reason="needs unshare, which is Linux's")
def test_a_loopback_interface_that_is_off_is_told_at_once():
    started = time.monotonic()
    done = in_a_network("")
    if "unshare failed" in done.stderr:
        pytest.skip("this system lets no program make a network")
    last = done.stderr.splitlines()[-1]
    assert last.startswith("OSError: 127.0.0.1 can't be reached") and last.endswith("switch the loopback interface on")
    assert time.monotonic() - started < 30


def test_the_store_listens_on_loopback_and_its_port_is_free_afterwards():
    with processes._rendezvous(timeout=5) as port, socket.create_connection(("127.0.0.1", port), timeout=5):
        pass
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", port), timeout=1)


def test_starting_leaves_the_notebooks_process_as_it_was():
    before, main_module = dict(os.environ), sys.modules["__main__"]
    with processes._clean_start({"RANK": "7"}):
        assert os.environ["RANK"] == "7" and sys.modules["__main__"] is not main_module
    assert dict(os.environ) == before and sys.modules["__main__"] is main_module


def test_an_interrupt_that_comes_while_starting_takes_effect_afterwards():
    finished = False
    with pytest.raises(KeyboardInterrupt), processes._interrupts_deferred():
        os.kill(os.getpid(), signal.SIGINT)
        finished = True
    assert finished
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_another_thread_may_start_ranks_too():
    seen = []

    def work():
        with processes._interrupts_deferred():
            seen.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [True]
