"""One test for each reported trouble with launching, meeting, hanging, output, environments and CI, named by its id.

The other tests look at the lab module by module; here stands what a learner is promised, whatever provides it.
"""

import contextlib
import inspect
import itertools
import json
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import tomllib
import types
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import cloudpickle
import nbformat
import psutil
import pytest
import test_notebooks
import torch
import torch.distributed as dist
from conftest import runs
from nbclient import NotebookClient
from nbconvert import HTMLExporter
from packaging.requirements import Requirement
from test_kernel import Kernel, all_gone, ranks_of
from test_launcher import total
from test_setup import CONDA_NAMES, ROOT, conda_dependencies, conda_environment, pip_dependencies
from test_train import Constant
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import ddp_lab
from ddp_lab import RankError, launcher, machine, processes, transport
from ddp_lab.dashboard import WIDGET_VIEW
from ddp_lab.data import shard
from ddp_lab.devices import choose_backend
from ddp_lab.train import evaluate, mean_over_ranks, start

WITH_KERNELS = {"kernel", "own_kernel", "executed", "compared", "tmp_notebooks"}
CPU = torch.device("cpu")
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # or each rank would import all of the above: seconds


@pytest.fixture(autouse=True)
def _fast_and_clean(request, fast):
    """What a launch leaves behind is looked for, except where a kernel's client keeps sockets open."""
    if not WITH_KERNELS & set(request.fixturenames):
        request.getfixturevalue("nothing_left")


def launch(fn, *args, **options):
    return ddp_lab.launch(fn, *args, **{"on_event": None, **options})


def failure(fn, *args, **options) -> RankError:
    with pytest.raises(RankError) as raised:
        launch(fn, *args, **options)
    return raised.value


def told(error: RankError) -> str:
    """All that the learner reads in the cell's error."""
    return "\n".join([f"{error}", *error.details])


def at_once(*calls):
    """Call all in threads of their own; return what they return."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


def sleeps(rank, world_size, seconds):
    time.sleep(seconds)
    return rank


@pytest.fixture
def no_process(monkeypatch):
    """Make the start of any rank an error of another kind than a refusal."""
    monkeypatch.setattr(processes, "Rank", None)


# ---- real notebooks and kernels -----------------------------------------------------------------------------------

SET_UP = """import sys, time
import ddp_lab
ddp_lab.fast_start()
factor = 3
def train(rank, world_size):
    for step in range(1, 21):
        ddp_lab.log(step=step, total_steps=20, loss=1 / step + rank)
        time.sleep(0.02)
    print(f"rank {rank} has trained")
    return (rank + 1) * factor
def noise(rank, world_size):
    for number in range(4):
        print("out", number)
        print("err", number, file=sys.stderr)
        time.sleep(0.01 * rank)"""
LAUNCH = "run = ddp_lab.launch(train)"
MAKE_VIEW = "from ddp_lab.dashboard import Dashboard\nview = Dashboard(2)"
USE_VIEW = "run = ddp_lab.launch(train, on_event=view)"
NOISE = "run = ddp_lab.launch(noise, on_event=None)"
CELLS = [SET_UP, LAUNCH, "run.results", MAKE_VIEW, USE_VIEW, "print('later')", *[NOISE] * 10]


def notebook_of(*cells: str):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return notebook


def execute(notebook):
    client = NotebookClient(notebook, timeout=60, kernel_name="python3")
    client.store_widget_state = False
    client.execute()
    return notebook


def nbval(path: Path, *options: str) -> subprocess.CompletedProcess:
    """Compare a notebook with its saved outputs as CI does, with the options of pyproject.toml."""
    command = [sys.executable, "-m", "pytest", "-c", "pyproject.toml", "-p", "no:cacheprovider", *options, path]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def executed(fast):
    """The notebook of CELLS with its outputs."""
    return execute(notebook_of(*CELLS))


@pytest.fixture(scope="module")
def compared(executed, tmp_path_factory):
    """What nbval says of the executed notebook: the failed cells by number, and how many it compared."""
    folder = tmp_path_factory.mktemp("compared")
    nbformat.write(executed, folder / "lesson.ipynb")
    nbval(folder / "lesson.ipynb", f"--junit-xml={folder / 'report.xml'}")
    cells = list(ElementTree.parse(folder / "report.xml").iter("testcase"))
    return {number: [child.text for child in cell] for number, cell in enumerate(cells)}


@pytest.fixture(scope="module")
def kernel(fast):
    kernel = Kernel()
    kernel.run(f"{SET_UP}\nddp_lab.launch(ddp_lab.hello, on_event=None)")
    yield kernel
    kernel.close()


@pytest.fixture
def own_kernel():
    kernel = Kernel()
    yield kernel
    kernel.close()


def messages_of(kernel: Kernel, code: str) -> list[dict]:
    """All that a cell makes the kernel say to the front end."""
    messages = []
    kernel.client.execute_interactive(code, timeout=60, output_hook=messages.append)
    assert not [message for message in messages if message["msg_type"] == "error"]
    return messages


def of_kind(messages: list[dict], *kinds: str) -> list[dict]:
    return [message["content"] for message in messages if message["msg_type"] in kinds]


def texts(cell) -> str:
    return "".join(output.text for output in cell.outputs if output.output_type == "stream")


# ---- launch -------------------------------------------------------------------------------------------------------


def test_b001_a_function_from_a_cell_runs_in_every_rank(executed):
    assert executed.cells[2].outputs[0].data["text/plain"] == "[3, 6]"
    assert "rank 0 has trained" in texts(executed.cells[1]) and "rank 1 has trained" in texts(executed.cells[1])
    assert "Can't get attribute" not in json.dumps(executed)


@pytest.fixture
def only_here(monkeypatch):
    """A function of a module that no other process can import."""
    module = types.ModuleType("only_here")
    exec("def fn(rank, world_size): pass", module.__dict__)
    monkeypatch.setitem(sys.modules, "only_here", module)
    return module.fn


@pytest.fixture
def dies_at_import(monkeypatch, tmp_path):
    (tmp_path / "dies_at_import.py").write_text(
        "import os\nif 'RANK' in os.environ:\n    os._exit(7)\ndef fn(rank, world_size): pass"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import dies_at_import

    yield dies_at_import.fn
    del sys.modules["dies_at_import"]


def test_b003_a_rank_that_dies_at_import_ends_the_run_once_with_the_cause(only_here, dies_at_import):
    not_found, dead = failure(only_here), failure(dies_at_import)
    assert "could not rebuild the function or an argument (ModuleNotFoundError: No module named 'only_here')" in told(
        not_found
    )
    assert "ended with exit code 7 and said nothing" in told(dead)
    assert max(not_found.run.seconds, dead.run.seconds) < 5


def calls(rank, world_size, config):
    return config["schedule"](3)


def test_b004_a_lambda_travels_and_what_cannot_is_named_with_its_path(no_process, monkeypatch):
    config = SimpleNamespace(lr=0.1, transform=[threading.Lock()])
    with pytest.raises(TypeError, match=r"^config\.transform\[0\] can't be sent to the ranks, because a lock"):
        launch(calls, config)
    with pytest.raises(TypeError, match=r"^config\['schedule'\] can't be sent to the ranks, because a generator"):
        launch(calls, {"lr": 0.1, "schedule": (i for i in range(3))})
    monkeypatch.undo()
    assert launch(calls, {"schedule": lambda step: 10 * step}).results == [30, 30]


def trains(rank, world_size, model):
    dist.init_process_group("gloo")
    replica = DistributedDataParallel(model)
    replica(torch.ones(1, 2)).sum().backward()
    torch.optim.SGD(replica.parameters(), lr=0.1).step()
    return model.state_dict()


def test_b005_trained_weights_come_back_and_the_notebooks_model_stays_as_it_was():
    model = nn.Linear(2, 1)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    trained = launch(trains, model).results[0]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(torch.allclose(trained[name], before[name] - 0.1) for name in before)
    assert "the notebook's own objects stay as they were" in " ".join(ddp_lab.launch.__doc__.split())


def without_rank(world_size, lr):
    pass


def test_b006_a_function_that_takes_no_rank_is_refused_with_both_signatures(no_process):
    words = (
        r"each rank would call without_rank\(rank, world_size, 2, 0\.1\), but the function is "
        r"without_rank\(world_size, lr\) .*: let its first two parameters take rank and world_size"
    )
    with pytest.raises(TypeError, match=words):
        launch(without_rank, 2, 0.1)


def fails(rank, world_size, how):
    dist.init_process_group("gloo")
    for step in range(20):
        print("step", step)
    if rank == 0:
        dist.barrier()
    if how == "exit":
        sys.exit(3)
    if how == "raise":
        raise ValueError("bad labels")
    os.kill(os.getpid(), how)


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ("exit", r"Rank 1 left with sys\.exit\(3\)"),
        ("raise", "Rank 1 failed .* with ValueError: bad labels"),
        (signal.SIGKILL, "Rank 1 died of SIGKILL, .*memory ran out"),
        (signal.SIGBUS, "Rank 1 died of SIGBUS.*/dev/shm"),
    ],
)
def test_b007_a_death_is_told_with_its_rank_its_cause_and_the_last_lines(how, cause, capsys):
    error = failure(fails, how)
    assert re.match(cause, f"{error}")
    assert error.run.exit_codes[1] == {"exit": 3, "raise": 1}.get(how, -how if isinstance(how, int) else None)
    assert "step 19" in told(error) or "[rank 1] step 19\n" in capsys.readouterr().out


def test_b009_ranks_outlive_the_thread_that_started_them(monkeypatch):
    monkeypatch.setattr(processes, "_preloaded", False)  # it is torch's own spawn that ties a rank to a thread
    call = transport.pack_job(sleeps, (1.0,), {})
    ranks = []
    with contextlib.ExitStack() as stack:
        thread = threading.Thread(target=start_and_leave, args=(stack, call, ranks))
        thread.start()
        thread.join()
        alive = [rank.alive for rank in ranks]
        while not all(rank.gone for rank in ranks):
            launcher._hear(ranks)
    assert alive == [True, True]
    assert [(rank.done, rank.exit_code) for rank in ranks] == [(True, 0), (True, 0)]


def start_and_leave(stack, call, ranks):
    ranks += stack.enter_context(processes.running(2, call, 60))
    while not all(rank.inbox for rank in ranks):  # each has said that it runs, so it knows its parent by now
        launcher._hear(ranks)


def does_not_end(rank, world_size):
    if rank == 0:
        signal.signal(signal.SIGTERM, lambda *_: [time.sleep(0.1) for _ in itertools.count()])
    dist.init_process_group("gloo")
    dist.barrier()
    if rank == 1:
        raise ValueError("bad labels")
    time.sleep(1000)


def test_b010_a_rank_that_does_not_die_is_killed_so_that_the_cell_returns():
    error = failure(does_not_end)
    assert (error.rank, error.run.exit_codes) == (1, [-signal.SIGKILL, 1])
    assert error.run.seconds < 8


LOADING = """import time, ddp_lab, torch
class Digits(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return index
def load(rank, world_size):
    loader = torch.utils.data.DataLoader(Digits(), num_workers=1, persistent_workers=True)
    next(iter(loader))
    time.sleep(1000)
ddp_lab.fast_start()"""


def ranks_and_workers(kernel: Kernel) -> list[psutil.Process]:
    ranks = ranks_of(kernel.pid, 2)
    for _ in range(200):
        workers = [[child for child in rank.children() if len(child.cmdline()) > 0] for rank in ranks]
        if all(workers):
            return [*ranks, *itertools.chain(*workers)]
        time.sleep(0.05)
    raise AssertionError("a loader did not start its worker")


def test_b011_interrupting_or_killing_the_kernel_ends_ranks_and_their_loaders(own_kernel):
    own_kernel.run(LOADING)
    request = own_kernel.start("ddp_lab.launch(load, on_event=None)")
    everything = ranks_and_workers(own_kernel)
    own_kernel.manager.interrupt_kernel()
    assert own_kernel.finish(request)[2][0].startswith("Interrupted: stopped by you")
    assert all_gone(everything)
    own_kernel.start("ddp_lab.launch(load, on_event=None)")
    everything = ranks_and_workers(own_kernel)
    os.kill(own_kernel.pid, signal.SIGKILL)
    assert all_gone(everything)


def started_by(rank, world_size):
    return type(multiprocessing.current_process()).__name__, hasattr(torch, "only_here"), os.getppid()


@pytest.mark.parametrize(("preloaded", "kind"), [(False, "SpawnProcess"), (True, "ForkServerProcess")])
def test_b012_ranks_are_never_forked_from_a_notebook_that_has_used_cuda(preloaded, kind, monkeypatch):
    monkeypatch.setattr(processes, "_preloaded", preloaded)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch, "only_here", True, raising=False)
    monkeypatch.setattr(os, "fork", None)
    for seen, has_the_notebooks_memory, parent in launch(started_by).results:
        assert (seen, has_the_notebooks_memory, parent == os.getpid()) == (kind, False, not preloaded)


@pytest.fixture
def probe(monkeypatch):
    """Let a quick program say what the doctor's would find."""

    def says(**found):
        code = f"import json; print('found', json.dumps({found!r}))"
        monkeypatch.setattr(machine, "PROBE", [sys.executable, "-I", "-S", "-c", code])

    says(threads=2, gpus=0, cuda=None, gloo="", names=[])
    return says


def rows_of(report, topic: str) -> list[machine.Row]:
    return [row for row in report.rows if topic in row.topic]


def test_b014_the_doctor_tells_start_method_gpus_and_whether_cuda_is_initialised(probe, monkeypatch):
    [gpus] = rows_of(ddp_lab.doctor(), "GPUs")
    assert re.match("none.* CPU", gpus.found)
    assert choose_backend(2)[0] == "gloo" or torch.cuda.device_count() > 1
    probe(threads=2, gpus=1, cuda="13.0", gloo="", nccl="RuntimeError: no driver", names=["T4"])
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    report = ddp_lab.doctor()
    assert "1: T4; this process has initialised CUDA" in rows_of(report, "GPUs")[0].found
    assert "backend='gloo'" in rows_of(report, "nccl")[0].cure
    assert any(re.search("spawn|forkserver", row.found) for row in report.rows)


def test_b016_launching_again_works_and_leaves_the_start_method_to_the_learner(monkeypatch):
    monkeypatch.setattr(multiprocessing.context._default_context, "_actual_context", None)
    for preloaded in (True, True, False):
        monkeypatch.setattr(processes, "_preloaded", preloaded)
        assert launch(sleeps, 0, world_size=1).results == [0]
        assert multiprocessing.get_start_method(allow_none=True) is None
    multiprocessing.set_start_method("fork")
    assert launch(started_by, world_size=1).results[0][:2] == ("SpawnProcess", False)
    assert multiprocessing.get_start_method() == "fork"


def loads(rank, world_size):
    loader = DataLoader(TensorDataset(torch.arange(6)), batch_size=2, num_workers=1)
    batches = [batch.tolist() for (batch,) in loader]
    return multiprocessing.current_process().daemon, batches


def test_b017_a_rank_may_have_loader_workers():
    assert launch(loads).results == [(False, [[0, 1], [2, 3], [4, 5]])] * 2


def multiplies(threads):
    torch.set_num_threads(threads)
    weights = torch.ones(300, 300, requires_grad=True)
    (weights @ weights).sum().backward()
    return weights.grad[0, 0].item()


def multiplies_in_rank(rank, world_size):
    return multiplies(2)


def forks(rank, world_size):
    dist.init_process_group("gloo")
    if rank == 1:
        multiplies(2)
        child = multiprocessing.get_context("fork").Process(target=multiplies, args=(2,))
        child.start()
        child.join()
    dist.barrier()


def test_b018_used_threads_of_the_notebook_do_no_harm_and_a_learners_own_fork_is_named():
    threads = torch.get_num_threads()
    try:
        multiplies(2)
        assert launch(multiplies_in_rank, timeout=10).results == [600, 600]
    finally:
        torch.set_num_threads(threads)
    error = failure(forks, timeout=1)
    assert (error.kind, error.rank) == ("hang", 1)
    assert "in forks" in f"{error}" and "child.join()" in told(error)


# ---- rendezvous ---------------------------------------------------------------------------------------------------


def test_b022_two_runs_at_once_need_no_port_and_29500_may_be_taken(monkeypatch):
    monkeypatch.setenv("MASTER_PORT", "29500")
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # then another program holds it, which is as good
            stack.enter_context(socket.create_server(("127.0.0.1", 29500)))
        runs_ = at_once(lambda: launch(total, 10), lambda: launch(total, 20))
    assert [[result.item() for result in run.results] for run in runs_] == [[21, 21], [41, 41]]


def serves_at(rank, world_size, port):
    dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)


def own_port(rank, world_size):
    return os.environ["MASTER_PORT"]


def test_b023_a_taken_port_is_named_with_the_process_that_holds_it():
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        error = failure(serves_at, port)
    assert f"127.0.0.1:{port}" in f"{error}"
    assert re.search(rf"\b{os.getpid()}\b", f"{error}")
    ports = [launch(own_port).results for _ in range(3)]
    assert all(one == other for one, other in ports) and len({one for one, _ in ports}) == 3


def rounds(rank, world_size):
    counted = []
    for _ in range(2):
        dist.init_process_group("gloo")
        store = dist.distributed_c10d._get_default_store()
        store.add("visits", 1)
        dist.barrier()
        counted.append(store.add("visits", 0))
        dist.destroy_process_group()
    return counted


def test_b026_every_round_meets_in_a_store_without_old_keys():
    for _ in range(3):
        run = launch(rounds, timeout=5)
        assert run.results == [[2, 2], [2, 2]]


def tokens(rank, world_size, token, die=False):
    dist.init_process_group("gloo")
    if die:
        os.kill(os.getpid(), signal.SIGKILL)
    found = [None] * world_size
    dist.all_gather_object(found, f"{token}{rank}")
    return found


def test_b027_a_killed_run_blocks_no_other_and_runs_at_once_stay_apart():
    assert failure(tokens, "a", die=True).kind == "death"
    one, other = at_once(lambda: launch(tokens, "b"), lambda: launch(tokens, "c"))
    assert one.results == [["b0", "b1"]] * 2
    assert other.results == [["c0", "c1"]] * 2


@pytest.mark.parametrize(("platform", "value"), [("win32", "0"), ("linux", None)])
def test_b030_on_windows_ranks_meet_without_libuv(platform, value, monkeypatch):
    monkeypatch.setattr(processes.sys, "platform", platform)
    assert processes._environment(0, 2, 1234).get("USE_LIBUV") == value


def trains_on_windows(rank, world_size):
    def init_process_group(*_, **__):
        raise RuntimeError("makeDeviceForHostname(): unsupported gloo device")

    dist.init_process_group = init_process_group
    ddp_lab.train(rank, world_size, epochs=1)


def test_b031_an_unsupported_platform_is_told_in_words():
    error = failure(trains_on_windows)
    assert all(name in f"{error}" for name in ("Linux", "macOS", "WSL2"))
    assert "makeDeviceForHostname" not in error.cure


@pytest.fixture
def gpus(monkeypatch):
    """Let this process and its ranks believe in some number of GPUs."""

    def pretend(count):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(dist, "is_nccl_available", lambda: True)

    pretend(0)
    return pretend


def wants_nccl(rank, world_size):
    dist.init_process_group("nccl")


def test_b032_without_gpus_auto_means_gloo_and_nccl_gets_a_plain_sentence(gpus, monkeypatch):
    run = launch(ddp_lab.train, epochs=1, backend="auto")
    assert run.output(0).startswith("backend gloo: this machine has 0 GPUs for 2 ranks")
    own_words = failure(wants_nccl)
    assert "nccl" in f"{own_words}".lower() and "GPU" in f"{own_words}"
    monkeypatch.setattr(processes, "Rank", None)
    words = "backend='nccl' needs one GPU per rank, and this machine has 0 GPUs for 2 ranks: use backend='gloo'"
    with pytest.raises(ValueError, match=words):
        launch(ddp_lab.train, backend="nccl")


def test_b033_more_ranks_than_gpus_get_gloo_or_a_refusal_with_both_numbers(gpus, no_process):
    gpus(1)
    assert choose_backend(2) == ("gloo", "this machine has 1 GPU for 2 ranks")
    with pytest.raises(ValueError, match="one GPU per rank, and this machine has 1 GPU for 2 ranks"):
        launch(ddp_lab.train, backend="nccl")


def test_b034_under_nccl_the_device_is_set_first_and_passed_on(gpus, monkeypatch):
    gpus(2)
    made = []
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: made.append(("set_device", device)))
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **given: made.append((backend, given["device_id"])))
    device = torch.device("cuda", 1)
    assert start(1, 2, "auto") == device
    assert made == [("set_device", device), ("nccl", device)]


# ---- hang ---------------------------------------------------------------------------------------------------------


def uneven(rank, world_size):
    dist.init_process_group("gloo")
    model = DistributedDataParallel(nn.Linear(2, 1))
    for _ in range(3 + rank):
        model(torch.ones(1, 2)).sum().backward()


def test_b036_unequal_numbers_of_steps_are_told_with_both_counts():
    error = failure(uneven)
    assert "rank 0: 3, rank 1: 4" in f"{error}"
    assert error.run.seconds < 10
    assert 30 <= inspect.signature(ddp_lab.launch).parameters["timeout"].default <= 60


def validates(rank, world_size, wrapped):
    dist.init_process_group("gloo")
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))).eval()
    if rank == 0:
        with torch.no_grad():
            (model if wrapped else model.module)(torch.ones(2, 4))
    dist.barrier()


def test_b037_validation_on_one_rank_through_the_wrapper_is_told_with_both_places():
    error = failure(validates, True, timeout=8)
    assert error.kind in ("mismatch", "hang")
    assert re.search("[Rr]ank 0 .*DDP wrapper", f"{error}") and re.search("[Rr]ank 1 .*barrier", f"{error}")
    assert "model.module" in error.cure
    assert error.run.seconds < 8
    assert launch(validates, False, timeout=8).outcome == "finished"


def validates_one(rank, world_size):
    dist.init_process_group("gloo")
    data = TensorDataset(torch.zeros(1, 1, 28, 28), torch.tensor([3]))
    accuracy = evaluate(Constant(), DataLoader(shard(data, rank, world_size)), CPU)
    return accuracy, mean_over_ranks(torch.tensor(2.0 * (rank == 0)), samples=1 - rank)


def test_b040_a_rank_without_samples_takes_part_in_every_metric():
    assert launch(validates_one, timeout=5).results == [(1.0, 2.0)] * 2


def long_phase(rank, world_size, seconds, limit=1800.0):
    dist.init_process_group("gloo")
    with ddp_lab.rank0_phase("evaluation", limit) as mine:
        if mine:
            time.sleep(seconds)
    dist.barrier()
    return mine


def test_b043_a_named_phase_of_rank_0_has_a_time_limit_of_its_own():
    assert launch(long_phase, 2, timeout=1).results == [True, False]
    error = failure(long_phase, 1000, 0.5)
    assert error.rank == 0 and "evaluation" in f"{error}"


def skips_a_barrier(rank, world_size, how):
    dist.init_process_group("gloo")
    if rank != 1:
        dist.barrier()
    elif how == "sleeps":
        time.sleep(1000)


@pytest.mark.parametrize("how", ["sleeps", "returns"])
def test_b045_the_rank_that_skipped_a_barrier_is_named(how):
    error = failure(skips_a_barrier, how, world_size=3, timeout=1)
    assert error.rank == 1
    assert re.search("in barrier .*rank 1", f"{error}")


# ---- output -------------------------------------------------------------------------------------------------------

SILENT = """def silent(rank, world_size):
    for step in range(1, 41):
        ddp_lab.log(step=step, total_steps=40, loss=1 / step)
        time.sleep(0.02)
    time.sleep(0.5)  # so that the last state is drawn
"""
IN_A_THREAD = """import threading
thread = threading.Thread(target=ddp_lab.launch, args=(silent,))
thread.start()
thread.join()"""


@pytest.mark.parametrize("cell", ["run = ddp_lab.launch(silent)", "run = ddp_lab.launch(silent)", IN_A_THREAD])
def test_b081_every_widgets_own_state_shows_all_ranks_and_the_cell_prints_nothing(kernel, cell):
    messages = messages_of(kernel, f"{SILENT}{cell}")
    assert of_kind(messages, "stream") == []
    opened = [content["data"]["state"] for content in of_kind(messages, "comm_open")]
    assert sorted(state["_model_name"] for state in opened) == ["HTMLModel", "HTMLStyleModel", "LayoutModel"]
    states = [content["data"].get("state", {}) for content in of_kind(messages, "comm_msg")]
    last = [state["value"] for state in states if "value" in state][-1]
    assert "rank 0" in last and "rank 1" in last
    assert max(last.count("step 40 of 40"), last.count("finished")) >= 2


def test_b082_pictures_stay_with_their_view_and_text_with_the_running_cell(executed):
    _, _, _, makes, uses, later = executed.cells[:6]
    assert [output.output_type for output in makes.outputs] == ["display_data"]
    assert "finished" in makes.outputs[0].metadata["image/png"]["alt"]
    assert [output.output_type for output in uses.outputs] == ["stream"]
    assert texts(uses) == "[rank 0] rank 0 has trained\n[rank 1] rank 1 has trained\n"
    assert texts(later) == "later\n" and len(later.outputs) == 1


def refused(path) -> bool:
    try:
        test_notebooks.test_no_widget_state_no_paths_no_colour_codes(path)
    except AssertionError:
        return True
    return False


def test_b083_shipped_notebooks_hold_no_widget_and_a_picture_for_each_live_chart(tmp_path, fast):
    found = sorted(test_notebooks.FOLDER.rglob("[!.]*.ipynb"))
    lessons = [path for path in found if ".ipynb_checkpoints" not in path.parts]
    assert len(lessons) >= 3
    assert not [path for path in lessons if refused(path)]
    displayed = [
        output
        for path in lessons
        for cell in test_notebooks.cells(path, "code")
        for output in cell.outputs
        if output.output_type == "display_data"
    ]
    assert displayed and all({"image/png", "text/plain"} <= set(output.data) for output in displayed)
    with_state = notebook_of("1")
    with_state.metadata["widgets"] = {WIDGET_VIEW: {}}
    nbformat.write(with_state, tmp_path / "bad.ipynb")
    assert refused(tmp_path / "bad.ipynb")


def test_b085_a_reader_of_the_html_page_sees_the_curve(executed):
    for template, words in (
        ("lab", "data:image/png;base64,"),
        ("classic", "DDP Lab: 2 ranks, finished. mean loss 0.5"),
    ):
        html, _ = HTMLExporter(template_name=template).from_notebook_node(executed)
        pictures = re.findall(r"<img[^>]*>", html)  # only the classic page shows their texts
        assert len(pictures) == 2 and all(words in picture for picture in pictures)
        assert "widget-view" not in html


FAST_STEPS = """def fast_steps(rank, world_size):
    for step in range(1, 10_001):
        ddp_lab.log(step=step, total_steps=10_000, loss=1 / step)
        time.sleep(0.0002)
run = ddp_lab.launch(fast_steps)
print(run.seconds)"""


def test_b086_ten_thousand_steps_make_few_messages_and_the_last_is_shown(kernel):
    messages = messages_of(kernel, FAST_STEPS)
    seconds = float(of_kind(messages, "stream")[-1]["text"])
    assert 2 < seconds < 20
    assert len(of_kind(messages, "comm_open", "comm_msg", "comm_close")) < 10 * seconds
    [last] = of_kind(messages, "update_display_data")
    assert "mean loss 0.0001." in last["metadata"]["image/png"]["alt"]


MANY_EPOCHS = """import warnings
import matplotlib.pyplot
warnings.simplefilter("error")
def epochs(rank, world_size):
    for epoch in range(1, 31):
        ddp_lab.log(step=epoch, epoch=epoch, loss=1 / epoch)
run = ddp_lab.launch(epochs)
for _ in range(25):  # matplotlib warns at 20 open figures
    figure = run.plot_loss()
print(matplotlib.pyplot.get_fignums())"""


def test_b088_thirty_epochs_leave_no_open_figure_and_no_warning(kernel):
    printed, _, error = kernel.run(MANY_EPOCHS)
    assert (printed, error) == ("[]\n", [])


def test_b091_a_front_end_without_widgets_sees_text_and_then_the_picture(kernel):
    messages = messages_of(kernel, LAUNCH)
    [first], [last] = of_kind(messages, "display_data"), of_kind(messages, "update_display_data")
    assert first["data"]["text/plain"] == "DDP Lab: 2 ranks"
    assert first["transient"] == last["transient"]
    assert list(last["data"]) == ["image/png", "text/plain"]
    without = messages_of(kernel, "ddp_lab.launch(train, on_event=None).plot_loss()")
    assert not of_kind(without, "comm_open", "comm_msg")
    [shown] = of_kind(without, "execute_result")
    assert "image/png" in shown["data"]


# ---- ci -----------------------------------------------------------------------------------------------------------


def test_b092_what_ranks_print_is_the_same_in_jupyter_and_under_pytest(executed, compared):
    assert texts(executed.cells[1]) == "[rank 0] rank 0 has trained\n[rank 1] rank 1 has trained\n"
    assert [compared[number] for number in range(6)] == [[]] * 6


def prints_and_leaves(rank, world_size):
    late = subprocess.Popen(["sh", "-c", "sleep 0.3; echo late; sleep 1000"])
    for number in range(2000):
        print(number)
    return late.pid


@pytest.fixture
def busy():
    """Two programs that take all the time there is."""
    programs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    yield
    for program in programs:
        program.kill()
        program.wait()


def test_b093_all_output_is_there_when_launch_returns_and_none_comes_later(busy, capfd):
    expected = "".join(f"{number}\n" for number in range(2000))
    for _ in range(10):
        run = launch(prints_and_leaves)
        assert not [pid for pid in run.results if runs(pid)]
        assert [run.output(rank).replace("late\n", "") for rank in (0, 1)] == [expected] * 2
    capfd.readouterr()
    time.sleep(0.5)
    assert capfd.readouterr() == ("", "")


def test_b094_stdout_and_stderr_mixed_give_the_same_output_each_time(executed, compared):
    [printed] = {texts(cell) for cell in executed.cells[6:]}
    assert printed.splitlines()[:3] == ["[rank 0] out 0", "[rank 0] err 0", "[rank 0] out 1"]
    assert len(compared) == 16
    assert [compared[number] for number in range(6, 16)] == [[]] * 10


KILLED = """import os, pathlib, signal, threading, time
import ddp_lab
def fn(rank, world_size, folder):
    (pathlib.Path(folder) / str(os.getpid())).touch()
    time.sleep(1000)
threading.Timer(5, os.kill, (os.getpid(), signal.SIGKILL)).start()
ddp_lab.launch(fn, {folder!r}, on_event=None)"""


def test_b097_a_killed_kernel_ends_the_job_at_the_cells_time_limit(tmp_notebooks):
    folder = tmp_notebooks
    (folder / "pids").mkdir()
    nbformat.write(notebook_of(KILLED.replace("{folder!r}", repr(str(folder / "pids")))), folder / "killed.ipynb")
    started = time.monotonic()
    done = nbval(folder / "killed.ipynb", "--nbval-cell-timeout=8")
    assert done.returncode == 1 and time.monotonic() - started < 60
    pids = [int(file.name) for file in (folder / "pids").iterdir()]
    assert len(pids) == 2 and not any(map(runs, pids))
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["addopts"]
    assert float(re.search(r"--nbval-cell-timeout=(\d+)", options)[1]) <= 120
    assert re.search(r"\btimeout\b.* make test", (ROOT / ".ci" / "run").read_text())


@pytest.fixture
def tmp_notebooks(tmp_path):
    return tmp_path


def test_b099_notebooks_with_ranks_run_after_one_another_and_at_once(tmp_notebooks):
    def run():
        return execute(notebook_of("import ddp_lab", "ddp_lab.launch(ddp_lab.hello, on_event=None).results"))

    for notebook in [run(), run(), *at_once(run, run)]:
        assert notebook.cells[1].outputs[-1].data["text/plain"] == str([f"hello from rank {n} of 2" for n in (0, 1)])


# ---- env ----------------------------------------------------------------------------------------------------------


def steps_per_second(rank, world_size, threads=None):
    if threads:
        torch.set_num_threads(threads)
    dist.init_process_group("gloo")
    model = DistributedDataParallel(nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10)))
    inputs = torch.ones(64, 784)
    for step in range(35):
        if step == 5:
            started = time.perf_counter()
        model(inputs).sum().backward()
    return torch.get_num_threads(), 30 / (time.perf_counter() - started)


def test_b105_ranks_share_the_cores_and_are_the_faster_for_it(plain_environment):
    cores = os.cpu_count()
    for world_size in (1, 2, 3):
        threads = [threads for threads, _ in launch(steps_per_second, world_size=world_size).results]
        assert min(threads) >= 1 and sum(threads) <= max(cores, world_size)
    (_, ours), _ = launch(steps_per_second).results
    (_, all_cores), _ = launch(steps_per_second, cores).results
    assert ours > 0.8 * all_cores


@pytest.mark.parametrize(("free", "status"), [(64, "warning"), (1000, "ok")])
def test_b106_a_small_shared_memory_is_told_with_the_cure(free, status, probe, plain_environment, monkeypatch):
    blocks = {"f_bavail": free, "f_bfree": free, "f_blocks": free}
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_frsize=1 << 20, **blocks))
    [row] = rows_of(ddp_lab.doctor(), "/dev/shm")
    assert (row.status, "num_workers=0" in row.cure) == (status, status == "warning")
    assert "num_workers=0" in failure(fails, signal.SIGBUS).cure


def openmp_runtimes(rank, world_size):
    import numpy  # the other half of a mixed environment

    numpy.ones((300, 300)) @ numpy.ones((300, 300))
    multiplies(2)
    paths = {Path(region.path).resolve() for region in psutil.Process().memory_maps()}
    return sorted(path.name for path in paths if re.match(r"lib(gomp|iomp|omp)", path.name))


def test_b108_the_doctor_lists_the_openmp_runtimes_and_a_rank_loads_one(plain_environment):
    for loaded in launch(openmp_runtimes).results:
        assert len(loaded) == 1
    [row] = rows_of(ddp_lab.doctor(), "OpenMP")
    assert row.status == "ok" and re.search("libg?i?omp", row.found)


def test_b109_one_source_of_packages_each_and_pytorch_imports():
    environment = conda_environment()
    assert environment["channels"] == ["conda-forge"]
    assert not [name for name in conda_dependencies() if "mkl" in name]
    code = "import torch; print((torch.ones(2, 2) @ torch.ones(2, 2)).tolist())"
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[[2.0, 2.0], [2.0, 2.0]]\n", "")


def test_b110_pip_comes_first_and_what_is_installed_fits_both_files():
    readme = (ROOT / "README.md").read_text()
    assert 0 < readme.index("make lab") < readme.index("conda env create")
    names = {conda: pip for pip, conda in CONDA_NAMES.items()}
    wanted = [
        *pip_dependencies().items(),
        *((names.get(name, name), bound) for name, bound in conda_dependencies().items()),
    ]
    for name, bound in wanted:
        if name not in ("python", "pip"):
            assert Requirement(f"{name}{bound}").specifier.contains(metadata.version(name), prereleases=True), name
