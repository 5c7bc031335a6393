"""The set-up: what conda and pip install agree, and `make` sets up, waits, repairs and complains as it promises."""

import fcntl
import importlib.util
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import tomllib
import venv
from collections import namedtuple
from pathlib import Path

import pytest
import yaml
from nbval.plugin import get_sanitize_patterns

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / ".ci" / "set_up.py"
CONDA_NAMES = {"matplotlib": "matplotlib-base", "torch": "pytorch"}
Usage = namedtuple("Usage", "total used free")


def load_set_up():
    spec = importlib.util.spec_from_file_location("set_up", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


set_up = load_set_up()


# What is installed ---------------------------------------------------------------------------------------------------


def pip_dependencies() -> dict[str, str]:
    """Name → lower bound, of pyproject.toml with the extra `test`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = project["dependencies"] + project["optional-dependencies"]["test"]
    return dict(re.fullmatch(r"([\w-]+)(>=[\d.]+)", line).groups() for line in lines)  # lower bounds only


def conda_environment() -> dict:
    return yaml.safe_load((ROOT / "environment.yml").read_text())


def conda_dependencies() -> dict[str, str]:
    lines = [line for line in conda_environment()["dependencies"] if isinstance(line, str)]
    return dict(re.fullmatch(r"([\w-]+)(.*)", line).groups() for line in lines)


def test_every_dependency_has_its_conda_twin_with_the_same_lower_bound():
    twins = {CONDA_NAMES.get(name, name): bound for name, bound in pip_dependencies().items()}
    twins |= {"pytorch": twins["pytorch"] + ",<3", "torchvision": "", "python": "=3.11", "pip": ""}
    assert conda_dependencies() == twins


def test_conda_uses_one_channel_and_pip_adds_only_the_lab():
    environment = conda_environment()
    assert environment["channels"] == ["conda-forge"]
    assert [line for line in environment["dependencies"] if not isinstance(line, str)] == [{"pip": ["-e ."]}]


# What is in the repository -------------------------------------------------------------------------------------------


def repository_files() -> list[Path]:
    """What git tracks, or would track."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        names = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    return [path for name in names.split(b"\0") if name and (path := ROOT / os.fsdecode(name)).is_file()]


def test_no_file_names_a_registry_or_a_path_of_one_machine():
    # The dots and slashes stand in brackets, so that this file does not name them either.
    hosts = r"pypi[.]org|pythonhosted[.]org|download[.]pytorch[.]org|anaconda[.](org|com)|npmjs[.]org"
    paths = r"[/](work|root|home|Users|opt|usr[/]local|mnt|scratch)[/]\w|[.][.][/]shared"
    texts = [(path, data.decode()) for path in repository_files() if b"\0" not in (data := path.read_bytes())]
    found = [
        (str(path.relative_to(ROOT)), hit[0]) for path, text in texts for hit in re.finditer(f"{hosts}|{paths}", text)
    ]
    assert len(texts) > 10
    assert not found


def test_there_is_no_lock_file():
    assert not [p for p in repository_files() if re.search(r"lock|^requirements.*[.]txt$", p.name)]


def test_git_ignores_what_is_made_and_keeps_the_sample():
    def ignored(*names):
        command = ["git", "check-ignore", *names]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.split()

    repository_files()  # skips outside a checkout
    made = [".venv/x", ".venv.lock", "data/MNIST/raw/x", "runs/x.pt", "notebooks/.ipynb_checkpoints/x", "a.egg-info/x"]
    assert ignored(*made) == made
    assert ignored("data/sample/MNIST/raw/x", "data/README.md") == []


def test_ci_run_is_executable():
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


# What nbval compares -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("saved", "new", "same"),
    [
        ("<function f at 0x7f3a5c1d2e80>", "<function f at 0x10a4b2c30>", True),
        ("2 ranks finished in 0.84 s", "2 ranks finished in 12.50 s", True),
        ("File /tmp/ipykernel_12/345.py, line 2", "File /var/tmp/ipykernel_678/9.py, line 2", True),
        ("rank 0 (pid 123)", "rank 0 (pid 45678)", True),
        ("store at 127.0.0.1:40001", "store at 127.0.0.1:55555", True),
        ("File /tmp/ipykernel_12/345.py, line 2", "File /tmp/ipykernel_12/345.py, line 3", False),
        ("gives up after 5 s", "gives up after 6 s", False),
        ("loss 0.25 sum 3", "loss 0.26 sum 3", False),
        ("rank 0", "rank 1", False),
    ],
)
def test_only_what_says_nothing_is_kept_from_the_comparison(saved, new, same):
    def sanitized(text):
        for pattern, replacement in get_sanitize_patterns((ROOT / "tests" / "sanitize.cfg").read_text()):
            text = re.sub(pattern, replacement, text)
        return text

    assert (sanitized(saved) == sanitized(new)) is same


# The Makefile --------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not shutil.which("make"), reason="no make here")
def test_make_lists_targets_that_exist():
    def make(*arguments):
        return subprocess.run(["make", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout

    targets = re.findall(r"^make (\w+)  ", make(), flags=re.MULTILINE)
    assert targets == ["lab", "train", "test", "setup", "notebooks"]
    for target in targets:
        assert ".ci/set_up.sh" in make("--dry-run", target)
    assert "-m ddp_lab --model convnet" in make("--dry-run", "train", "ARGS=--model convnet")
    assert ("--allow-root" in make("--dry-run", "lab")) is (os.getuid() == 0)


# Finding a Python ----------------------------------------------------------------------------------------------------

STAND_INS = {
    "good": f'exec "{sys.executable}" "$@"',
    "pyenv's": "echo 'pyenv: command not found' >&2; exit 127",
    "old": f'[ "$1" = -c ] && exec "{sys.executable}" -c "import sys; sys.version_info = (3, 10, 9)\n$2"; exit 99',
    "without venv": f'[ "$1" = -c ] && exec "{sys.executable}" -c "import sys; sys.modules[\'ensurepip\'] = None\n$2"',
}


@pytest.fixture
def find_python(tmp_path):
    """Run set_up.sh on a machine that has only these Pythons, where set_up.py only says that it ran."""
    tools = tmp_path / "bin with space"
    tools.mkdir()
    (tools / "dirname").symlink_to(shutil.which("dirname"))
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "set_up.sh", tmp_path / ".ci")
    (tmp_path / ".ci" / "set_up.py").write_text("print('set_up.py ran')")

    def find(named: str = "", **pythons: str) -> str:
        for name, kind in pythons.items():
            (tools / name.replace("_", ".")).write_text(f"#!/bin/sh\n{STAND_INS[kind]}\n")
            (tools / name.replace("_", ".")).chmod(0o755)
        environment = {"PATH": str(tools), "PYTHON": str(tools / named) if named else ""}
        command = [shutil.which("sh"), str(tmp_path / ".ci" / "set_up.sh")]
        result = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert (result.returncode == 0) is (result.stdout == "set_up.py ran\n")
        assert len(result.stderr.splitlines()) == (result.returncode != 0)  # one sentence
        return result.stdout + result.stderr

    return find


def test_a_python_that_does_not_run_or_lacks_venv_is_passed_over(find_python):
    pythons = {"python3_13": "pyenv's", "python3_12": "without venv", "python3_11": "old", "python3": "good"}
    assert find_python(**pythons) == "set_up.py ran\n"


def test_a_named_python_is_used(find_python):
    assert find_python(named="mine", mine="good", python3="pyenv's") == "set_up.py ran\n"


def test_a_named_python_that_does_not_fit_is_refused_even_if_another_would(find_python):
    assert "mine is not a Python 3.11" in find_python(named="mine", mine="old", python3="good")
    assert "missing is not a Python 3.11" in find_python(named="missing", python3="good")


def test_no_python_at_all_is_said(find_python):
    assert find_python().startswith("DDP Lab needs Python 3.11 or newer")
    assert find_python(python3="old", python3_12="pyenv's").startswith("DDP Lab needs Python 3.11 or newer")


def test_a_missing_venv_module_is_said(find_python):
    assert "python3 lacks the modules venv and ensurepip" in find_python(python3="without venv", python3_12="old")


# Disk, damage, and what pip says -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("held_gb", "usable", "free_gb", "enough"),
    [
        (0, False, 9.1, True),
        (0, False, 8.9, False),
        (5, True, 1.6, True),  # a gigabyte is missing
        (5, True, 1.4, False),
        (7, True, 0, True),
        (5, False, 4.1, True),  # what is there goes first
        (5, False, 3.9, False),
    ],
)
def test_too_little_disk_is_said_before_anything_is_installed(tmp_path, monkeypatch, held_gb, usable, free_gb, enough):
    gigabytes = 10**9
    monkeypatch.setattr(set_up, "KEPT", 6 * gigabytes)
    monkeypatch.setattr(set_up, "size_of", lambda folder: held_gb * gigabytes)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, free_gb * gigabytes))
    if enough:
        set_up.require_disk(tmp_path / ".venv", usable)
    else:
        with pytest.raises(set_up.SetUpError, match=r"takes \d\.\d GB of disk .* has \d\.\d GB free: free some space"):
            set_up.require_disk(tmp_path / ".venv", usable)


def test_size_counts_every_file_once(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "full").write_bytes(bytes(100_000))
    (tmp_path / "link").symlink_to("a/full")
    assert set_up.size_of(tmp_path) == 100_000 + len("a/full")
    assert set_up.size_of(tmp_path / "missing") == 0


@pytest.fixture
def env(tmp_path) -> Path:
    """An environment in .venv that set_up.py takes for complete; its pip does nothing."""
    env = tmp_path / ".venv"
    venv.create(env, symlinks=True)
    next(env.glob("lib/python3*/site-packages")).joinpath("pip.py").touch()
    (tmp_path / "pyproject.toml").touch()
    return env


def test_a_damaged_environment_is_recognised(env):
    assert set_up.python_in(env) == sys.version_info[:2]
    (env / "bin" / "activate").unlink()
    assert set_up.python_in(env) is None


def test_an_environment_without_pip_is_recognised(env):
    next(env.glob("lib/python3*/site-packages/pip.py")).unlink()
    assert set_up.python_in(env) is None


def test_an_environment_whose_python_is_gone_is_recognised(env):
    (env / "bin" / "python").unlink()
    (env / "bin" / "python").symlink_to(env / "gone")
    assert set_up.python_in(env) is None


def test_only_packages_that_pip_did_not_finish_are_removed(env):
    packages = next(env.glob("lib/python3*/site-packages"))
    records = {
        "whole": "whole.py,,\nwhole-1.dist-info/INSTALLER,,\n",
        "cut_short": "cut_short.py,,\n",
        "unlisted": None,
    }
    for name, record in records.items():
        (packages / f"{name}-1.dist-info").mkdir()
        if record:
            (packages / f"{name}-1.dist-info" / "RECORD").write_text(record)
    (packages / "~orch").mkdir()
    set_up.temporary_in(env).mkdir()
    set_up.remove_unfinished(env)
    assert sorted(path.name for path in packages.iterdir()) == ["pip.py", "whole-1.dist-info"]
    assert not set_up.temporary_in(env).exists()


def test_a_stamp_holds_for_one_pyproject_one_folder_and_one_python(env):
    root, python = env.parent, sys.version_info[:2]
    assert not set_up.up_to_date(root, python)
    set_up.stamp_of(root).write_text(set_up.fingerprint(root, python))
    assert set_up.up_to_date(root, python)
    assert not set_up.up_to_date(root, (4, 0))
    moved = root.rename(root.with_name("moved ü"))
    assert not set_up.up_to_date(moved, python)
    (moved.rename(root) / "pyproject.toml").write_text("[project]")
    assert not set_up.up_to_date(root, python)


def test_a_full_disk_is_recognised_in_what_pip_says():
    said = "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device"
    assert "filled up" in set_up.cause_in(said)
    assert set_up.cause_in("ERROR: something else") == set_up.UNKNOWN_CAUSE


# Two at once ---------------------------------------------------------------------------------------------------------

SLOW_SET_UP = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import set_up
root = Path(sys.argv[2])
def install(root, lock):
    with open(root / "installs", "a") as file:
        file.write("start\\n"); file.flush()
        time.sleep(0.5)
        file.write("end\\n")
    if sys.argv[3] == "fails":
        raise set_up.SetUpError("this installation fails")
set_up.KEPT = 0
set_up.set_up(root, install)
"""


@pytest.mark.parametrize(("outcome", "installs"), [("works", 1), ("fails", 3)])
def test_set_ups_at_once_take_turns(env, outcome, installs):
    command = [sys.executable, "-c", SLOW_SET_UP, SCRIPT.parent, env.parent, outcome]
    setups = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for _ in range(3)]
    said = "".join(process.communicate(timeout=60)[0] for process in setups)
    assert (env.parent / "installs").read_text() == "start\nend\n" * installs
    assert said.count("waiting for it to finish") == 2
    assert [process.returncode for process in setups] == [int(outcome == "fails")] * 3
    assert set_up.stamp_of(env.parent).exists() is (outcome == "works")


def test_the_lock_outlives_a_killed_set_up_until_its_pip_ends(tmp_path):
    lock, flag = tmp_path / "lock", tmp_path / "flag"
    flag.touch()
    code = (
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[1]); import set_up\n"
        "with set_up.locked(Path(sys.argv[2])) as lock:\n"
        "    set_up.run(['sh', '-c', 'echo running; while [ -e \"$0\" ]; do sleep 0.05; done', sys.argv[3]], lock)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, SCRIPT.parent, lock, flag], stdout=subprocess.PIPE)
    try:
        assert process.stdout.readline() == b"running\n"
        process.kill()
        process.wait()
        with lock.open("w") as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        flag.unlink()
    with set_up.locked(lock):
        assert process.stdout.read() == b""


# From nothing to an environment, with the real venv and the real pip -------------------------------------------------

PYPROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
"""
BACKEND = """
import os, pathlib, time, zipfile

def build_editable(folder, config_settings=None, metadata_directory=None):
    while os.path.exists("wait"):
        pathlib.Path("waiting").touch()
        time.sleep(0.05)
    metadata = "Metadata-Version: 2.1\\nName: toy\\nVersion: 1\\nProvides-Extra: test\\n"
    needs = pathlib.Path("needs").read_text() if os.path.exists("needs") else ""
    with zipfile.ZipFile(os.path.join(folder, "toy-1-py3-none-any.whl"), "w") as wheel:
        wheel.writestr("toy.py", "")
        wheel.writestr("toy-1.dist-info/METADATA", metadata + needs)
        wheel.writestr("toy-1.dist-info/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr("toy-1.dist-info/RECORD", "")
    return "toy-1-py3-none-any.whl"
"""


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Path:
    """A project that is set up as the lab is, but needs no network; its folder's name is awkward."""
    root = tmp_path_factory.mktemp("of setup") / "my lab ü"
    (root / ".ci").mkdir(parents=True)
    shutil.copy(ROOT / ".ci" / "set_up.sh", root / ".ci")
    script, replaced = re.subn(r"^KEPT = .*$", "KEPT = GB // 10", SCRIPT.read_text(), flags=re.MULTILINE)
    assert replaced == 1
    (root / ".ci" / "set_up.py").write_text(script)
    (root / "pyproject.toml").write_text(PYPROJECT)
    (root / "backend.py").write_text(BACKEND)
    return root


def start_set_up(toy: Path, **settings: str) -> subprocess.Popen:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON"))}
    environment |= {"PYTHON": sys.executable, "PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", **settings}
    command = [shutil.which("sh"), toy / ".ci" / "set_up.sh"]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def run_set_up(toy: Path, **settings: str) -> tuple[int, str]:
    process = start_set_up(toy, **settings)
    said, _ = process.communicate(timeout=120)
    return process.returncode, said


def has_toy(toy: Path) -> bool:
    return (
        subprocess.run([toy / ".venv" / "bin" / "python", "-I", "-c", "import toy"], capture_output=True).returncode
        == 0
    )


def test_an_interrupted_set_up_leaves_no_stamp_and_the_next_one_finishes_it(toy):
    (toy / "wait").touch()
    process = start_set_up(toy)
    try:
        deadline = time.monotonic() + 60
        while not (toy / "waiting").exists():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)  # sh has handed its process id over to set_up.py
        said, _ = process.communicate(timeout=20)
    finally:
        (toy / "wait").unlink()
    assert process.returncode == 130
    assert said.splitlines()[-1] == "The set-up was interrupted: run make again to finish it."
    assert not set_up.stamp_of(toy).exists()
    assert not has_toy(toy)

    (toy / ".venv" / "bin" / "activate").unlink()
    (toy / ".venv" / "lib" / "rest").touch()
    code, said = run_set_up(toy)
    assert code == 0, said
    assert "making it anew" in said
    assert not (toy / ".venv" / "lib" / "rest").exists()
    assert has_toy(toy)


def test_nothing_is_done_or_said_when_nothing_changed(toy, tmp_path):
    assert run_set_up(toy)[0] == 0
    (tmp_path / "dirname").symlink_to(shutil.which("dirname"))
    start = time.monotonic()
    assert run_set_up(toy, PYTHON="", PATH=str(tmp_path)) == (0, "")  # it does not even look for a Python
    assert time.monotonic() - start < 1
    assert run_set_up(toy) == (0, "")  # PYTHON names the one that is there


@pytest.mark.parametrize("cause", ["network", "package"])
def test_a_failed_installation_leaves_no_stamp_and_says_why_in_one_sentence(toy, cause):
    assert run_set_up(toy)[0] == 0
    with socket.socket() as closed:  # bound, but nobody listens
        closed.bind(("127.0.0.1", 0))
        index = f"http://127.0.0.1:{closed.getsockname()[1]}/"
        settings = {"network": {"PIP_NO_INDEX": "0", "PIP_INDEX_URL": index, "PIP_RETRIES": "1"}, "package": {}}
        (toy / "needs").write_text("Requires-Dist: ddp-lab-needs-no-such-package\n")
        (toy / "pyproject.toml").write_text(PYPROJECT + "# changed\n")
        code, said = run_set_up(toy, **settings[cause])
    (toy / "needs").unlink()
    (toy / "pyproject.toml").write_text(PYPROJECT)
    sentence = {"network": "pip can't reach its package index", "package": "A package that the lab needs has no build"}
    assert code == 1
    assert said.splitlines()[-1].startswith(sentence[cause])
    assert not set_up.stamp_of(toy).exists()
    assert run_set_up(toy)[0] == 0  # the environment has survived
