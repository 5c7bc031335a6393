"""The lab in real notebook kernels: cells, Stop, and kernels that are killed."""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request

import psutil
import pytest
import torch
from conftest import pids_gone
from jupyter_client.blocking import BlockingKernelClient
from jupyter_client.manager import KernelManager
from jupyter_server.serverapp import list_running_servers

CELL_FUNCTION = """import torch, torch.distributed as dist, ddp_lab
class Box:
    size = 3
factor = 2
def fn(rank, world_size, wait=False):
    dist.init_process_group("gloo")
    if wait and rank == 0:
        return dist.all_reduce(torch.ones(1))
    import time
    time.sleep(1000 if wait else 0)
    if rank == 1 and factor == 3:
        raise ValueError("wrong factor")
    return Box.size * factor
"""


class Kernel:
    def __init__(self):
        self.manager = KernelManager(kernel_name="python3")
        self.manager.start_kernel()
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)
        self.pid = psutil.Process(self.manager.provisioner.pid).pid

    def start(self, code):
        return self.client.execute(code)

    def finish(self, request, timeout=60):
        """Return (text printed, last text/plain, error's lines) of a cell."""
        printed, shown, error = "", None, []
        deadline = time.monotonic() + timeout
        while True:
            message = self.client.get_iopub_msg(timeout=max(0.1, deadline - time.monotonic()))
            if message["parent_header"].get("msg_id") != request:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "stream":
                printed += content["text"]
            elif kind in ("execute_result", "display_data", "update_display_data"):
                shown = content["data"]["text/plain"]
            elif kind == "error":
                error = content["traceback"]
            elif kind == "status" and content["execution_state"] == "idle":
                return printed, shown, error

    def run(self, code, timeout=60):
        return self.finish(self.start(code), timeout)

    def close(self):
        self.client.stop_channels()
        with contextlib.suppress(RuntimeError, queue.Empty):
            self.manager.shutdown_kernel()  # not at once: Python removes its temporary files then


@pytest.fixture(scope="module", params=["spawn", "fast_start"])
def kernel(request):
    """A kernel that several tests share, which is a test by itself: whatever one breaks, the next must find whole."""
    kernel = Kernel()
    kernel.run(CELL_FUNCTION)
    kernel.run("ddp_lab.fast_start()" if request.param == "fast_start" else "")
    yield kernel
    kernel.close()


@pytest.fixture
def own_kernel():
    kernel = Kernel()
    kernel.run(CELL_FUNCTION)
    yield kernel
    kernel.close()


def ranks_of(pid, count, seconds=20):
    """Wait until `count` rank processes run under a kernel, and are past their imports; return them."""
    return until(lambda: len(found := ranks_under(pid)) == count and found, seconds)


def ranks_under(pid):
    """The processes under a kernel that lead a group of their own, save the kernel of a server and fast_start's."""
    everything = psutil.Process(pid).children(recursive=True)
    return [p for p in everything if os.getpgid(p.pid) == p.pid and not is_server(p) and not is_kernel(p)]


def is_server(process):
    """Whether it is fast_start's; the ranks that it forks have the same command line."""
    with contextlib.suppress(psutil.Error):
        return "forkserver" in "".join(process.cmdline()) and "forkserver" not in "".join(process.parent().cmdline())
    return False


def is_kernel(process):
    with contextlib.suppress(psutil.Error):
        return "ipykernel_launcher" in process.cmdline()
    return False


def all_gone(processes, seconds=3):
    return pids_gone([process.pid for process in processes], seconds)


def until(condition, seconds=30):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not in {seconds} s"
        time.sleep(0.02)
    return found


def temporary_files():
    return {name for name in os.listdir(tempfile.gettempdir()) if not name.startswith("torchinductor_")}


def test_a_cells_function_class_and_globals_reach_the_ranks(kernel):
    printed, shown, error = kernel.run("ddp_lab.launch(fn, on_event=None).results")
    assert (printed, shown, error) == ("", "[6, 6]", [])
    assert kernel.run("factor = 5; ddp_lab.launch(fn, on_event=None).results")[1] == "[15, 15]"
    kernel.run("factor = 2")


def test_an_error_shows_the_cells_lines_and_nothing_of_the_launcher(kernel):
    error = "\n".join(kernel.run("factor = 3; ddp_lab.launch(fn, on_event=None)")[2])
    kernel.run("factor = 2")
    assert error.startswith("RankError: Rank 1 failed at Cell In[1], line 12, in fn with ValueError: wrong factor")
    assert '    raise ValueError("wrong factor")' in error
    assert "launcher.py" not in error and "\x1b" not in error and "ipykernel" not in error


def test_the_live_output_ends_as_one_picture_with_a_constant_text(kernel):
    request = kernel.start("run = ddp_lab.launch(fn)")
    assert kernel.finish(request)[1:] == ("DDP Lab: 2 ranks", [])


def test_stop_leaves_no_process_and_a_kernel_that_works(kernel):
    request = kernel.start("ddp_lab.launch(fn, True)")
    ranks = ranks_of(kernel.pid, 2)
    time.sleep(1.5)
    pressed = time.monotonic()
    kernel.manager.interrupt_kernel()
    _, shown, error = kernel.finish(request)
    assert time.monotonic() - pressed < 3
    assert shown == "DDP Lab: 2 ranks"
    assert error[0] == "Interrupted: stopped by you; all 2 ranks have ended"
    assert all_gone(ranks)
    assert kernel.run("ddp_lab.launch(fn, on_event=None).results")[1] == "[6, 6]"


CHECKPOINT = """import torch, ddp_lab
from ddp_lab.train import save_checkpoint
def writes(rank, world_size, path):
    while True:
        save_checkpoint(torch.nn.Linear(1000, 1000), path)
"""


def test_stop_while_a_checkpoint_is_written_leaves_a_whole_one(kernel, tmp_path):
    path = tmp_path / "weights.pt"
    kernel.run(CHECKPOINT)
    for pause in (0.0, 0.003, 0.007):
        path.unlink(missing_ok=True)
        request = kernel.start(f"ddp_lab.launch(writes, {str(path)!r}, world_size=1, on_event=None)")
        until(path.exists)
        time.sleep(pause)
        kernel.manager.interrupt_kernel()
        assert kernel.finish(request)[2][0] == "Interrupted: stopped by you; the rank has ended"
        assert torch.load(path)["weight"].shape == (1000, 1000)


def test_stop_pressed_again_and_again_is_one_stop(kernel):
    request = kernel.start("ddp_lab.launch(fn, True)")
    ranks = ranks_of(kernel.pid, 2)
    time.sleep(1.0)
    for _ in range(5):
        kernel.manager.interrupt_kernel()
        time.sleep(0.02)
    error = kernel.finish(request)[2]
    assert error[0] == "Interrupted: stopped by you; all 2 ranks have ended"
    assert all_gone(ranks)
    assert kernel.run("ddp_lab.launch(fn, on_event=None).results")[1] == "[6, 6]"


@pytest.mark.parametrize("delay", [0.2, 1.5])
@pytest.mark.parametrize("fast", [False, True])
def test_stop_while_starting_is_as_quiet(own_kernel, fast, delay):
    kernel = own_kernel
    request = kernel.start(f"{'ddp_lab.fast_start()' if fast else ''}\nddp_lab.launch(fn, True)")
    time.sleep(delay)
    kernel.manager.interrupt_kernel()
    printed, _, error = kernel.finish(request)
    in_launch = error[0].startswith("Interrupted: stopped by you; all 2 ranks have ended")
    assert in_launch or "fast_start" in "".join(error)
    assert printed == "" and len(error) < 60
    assert not ranks_under(kernel.pid)
    assert kernel.run("ddp_lab.launch(fn, on_event=None).results")[1] == "[6, 6]"


@pytest.mark.parametrize("fast", [False, True])
def test_a_killed_kernel_takes_its_ranks_with_it(own_kernel, fast):
    kernel, before = own_kernel, temporary_files()
    kernel.run("ddp_lab.fast_start()" if fast else "")
    kernel.start("ddp_lab.launch(fn, True)")
    ranks = ranks_of(kernel.pid, 2)
    everything = psutil.Process(kernel.pid).children(recursive=True)
    time.sleep(1.0)
    assert temporary_files() > before  # or what follows would prove nothing
    os.kill(kernel.pid, signal.SIGKILL)
    assert all_gone(ranks)
    assert all_gone(everything)
    assert temporary_files() == before


def test_a_restarted_kernel_takes_its_ranks_with_it(own_kernel):
    kernel = own_kernel
    kernel.start("ddp_lab.launch(fn, True)")
    ranks = ranks_of(kernel.pid, 2)
    kernel.manager.restart_kernel(now=True)
    assert all_gone(ranks)


def answers(address):
    with contextlib.suppress(OSError), urllib.request.urlopen(f"{address}api"):
        return True


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A notebook server: (process, address)."""
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path))
    options = ["--ServerApp.port=0", "--ServerApp.port_retries=0", "--IdentityProvider.token=", "--no-browser"]
    command = [sys.executable, "-m", "jupyter_server", "--allow-root", "--ServerApp.disable_check_xsrf=True", *options]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL)
    running = until(lambda: list(list_running_servers(tmp_path)))  # which it says before it listens
    until(lambda: answers(running[0]["url"]))
    yield process, running[0]["url"]
    process.kill()
    process.wait()


@pytest.mark.parametrize("how", ["SIGTERM", "SIGHUP"])  # stopped with Ctrl-C and yes, or its terminal was closed
def test_a_server_that_ends_takes_kernels_and_ranks_with_it(server, tmp_path, how):
    process, address = server
    with urllib.request.urlopen(f"{address}api/kernels", data=b"{}") as answer:
        name = json.load(answer)["id"]
    client = BlockingKernelClient(connection_file=str(tmp_path / f"kernel-{name}.json"))
    client.load_connection_file()
    client.start_channels()
    client.wait_for_ready(timeout=60)
    client.execute(CELL_FUNCTION)
    client.execute("ddp_lab.launch(fn, True)")
    ranks_of(process.pid, 2)
    everything = psutil.Process(process.pid).children(recursive=True)
    client.stop_channels()
    process.send_signal(getattr(signal, how))
    assert process.wait(timeout=30) is not None
    assert all_gone(everything, seconds=5)


def test_two_kernels_at_once_do_not_disturb_each_other(kernel):
    other = Kernel()
    try:
        requests = []
        other.run(CELL_FUNCTION.replace("size = 3", "size = 4"))
        for each in (kernel, other):
            requests.append((each, each.start("ddp_lab.launch(fn, on_event=None).results")))
        assert [each.finish(request)[1] for each, request in requests] == ["[6, 6]", "[8, 8]"]
    finally:
        other.close()
