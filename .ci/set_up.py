"""Bring .venv in line with pyproject.toml. `make` runs this (through set_up.sh) before anything else.

Quick when nothing changed, safe when two run at once, and what an interruption left half done the next run repairs.
Standard library only: it runs before anything is installed.
"""

import fcntl
import hashlib
import os
import platform
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

ROOT = Path(__file__).resolve().parent.parent
OLDEST = (3, 11)
GB = 10**9
# Measured on x86-64 Linux: the finished environment, CUDA libraries included, takes 6.2 GB; without those less than 2.
# pip holds all its downloads, half as much again, until everything is installed.
KEPT = 6.2 * GB if (platform.system(), platform.machine()) == ("Linux", "x86_64") else 2 * GB
DOWNLOADED = 0.5
# What pip says when it fails, and the sentence that is said instead. The first that fits is taken.
CAUSES = (
    (
        ("No space left on device", "Disk quota exceeded"),
        "The disk (or your quota) filled up during the installation: free some space, then run make again.",
    ),
    (
        ("Max retries exceeded", "NewConnectionError", "NameResolutionError", "TimeoutError", "ProxyError", "SSLError"),
        "pip can't reach its package index: check the network and proxy settings, then run make again.",
    ),
    (
        ("No matching distribution found",),
        "A package that the lab needs has no build for this Python on this machine: name another Python, for example "
        "make lab PYTHON=python3.12.",
    ),
)
UNKNOWN_CAUSE = "pip could not install the lab: its own message is above; mend that, then run make again."


class SetUpError(Exception):
    """What stops the set-up and what to do about it, in one sentence."""


def fingerprint(root: Path, python: tuple[int, int]) -> str:
    """Name what an environment is made for: these dependencies, in this folder (-e refers to it), with this Python."""
    parts = (root / "pyproject.toml").read_bytes(), os.fsencode(root), repr(python).encode()
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def up_to_date(root: Path, python: tuple[int, int]) -> bool:
    """Whether the last set-up finished, and for the same fingerprint."""
    try:
        return stamp_of(root).read_text() == fingerprint(root, python)
    except FileNotFoundError:
        return False


def stamp_of(root: Path) -> Path:
    return root / ".venv" / "set_up.stamp"


def python_in(env: Path) -> tuple[int, int] | None:
    """The version of the environment's Python, or None where the environment can't be used.

    An interrupted creation leaves no pip or no `activate`; an upgrade of the system's Python leaves a broken link.
    """
    command = [env / "bin" / "python", "-I", "-c", "import sys, pip; print(*sys.version_info[:2])"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    version = tuple(int(part) for part in answer.split())
    return version if version >= OLDEST and (env / "bin" / "activate").exists() else None


def require_disk(env: Path, usable: bool) -> None:
    """Raise SetUpError where the disk can't hold what is still missing from the environment.

    usable: its packages stay and need not be installed again; otherwise it is removed, which frees its place.
    """
    held = size_of(env)
    free = shutil.disk_usage(env if env.exists() else env.parent).free
    missing, free = (max(0, KEPT - held), free) if usable else (KEPT, free + held)
    needed = missing * (1 + DOWNLOADED)
    if free < needed:
        raise SetUpError(
            f"Setting up DDP Lab takes {needed / GB:.1f} GB of disk ({missing / GB:.1f} GB to keep, the rest while "
            f"it installs), and {env.parent} has {free / GB:.1f} GB free: free some space, then run make again."
        )


def size_of(folder: Path) -> int:
    """Bytes in the files of a folder; 0 where there is no such folder."""
    paths = (os.path.join(parent, name) for parent, _, names in os.walk(folder) for name in names)
    return sum(os.lstat(path).st_size for path in paths)


@contextmanager
def locked(path: Path) -> Iterator[TextIO]:
    """Let one set-up at a time into this folder; the others wait. Yields the open file that holds the lock."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("Another make is setting up .venv: waiting for it to finish.", flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            print("This file system has no locks: don't run two set-ups at once.", flush=True)
        yield file


def run(command: list, lock: TextIO, **options) -> tuple[int, str]:
    """Run a command, showing what it prints; return its exit code and what it said on stderr.

    The child holds the lock too: should this process be killed, the next set-up still waits for the child's end.
    """
    child = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, errors="replace", pass_fds=[lock.fileno()], **options
    )
    said = []
    try:
        for line in child.stderr:
            sys.stderr.write(line)
            said.append(line)
        return child.wait(), "".join(said)
    except BaseException:
        child.kill()
        child.wait()
        raise


def create(env: Path, lock: TextIO) -> None:
    """Make an empty environment, in place of an unusable one. Raises SetUpError when that fails."""
    if env.exists():
        print("The environment in .venv can't be used as it is: making it anew.", flush=True)
    code, _ = run([sys.executable, "-I", "-m", "venv", "--clear", env], lock)
    if code:
        raise SetUpError(f"{sys.executable} could not make an environment in {env}: its own message is above.")


def remove_unfinished(env: Path) -> None:
    """Remove the traces of packages whose installation was interrupted, so that pip installs them again.

    pip takes any .dist-info folder for an installed package. It writes the RECORD that lists INSTALLER last of all.
    """
    for info in env.glob("lib/python3*/site-packages/*.dist-info"):
        record = info / "RECORD"
        if not record.exists() or f"{info.name}/INSTALLER," not in record.read_text(errors="replace"):
            shutil.rmtree(info)
    leftovers = [*env.glob("lib/python3*/site-packages/~*"), temporary_in(env)]
    for path in leftovers:  # pip renames what it is about to replace to ~name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def temporary_in(env: Path) -> Path:
    return env / "pip-temporary"


def install(root: Path, lock: TextIO) -> None:
    """Install the lab and its dependencies into .venv. Raises SetUpError that names the cause."""
    env = root / ".venv"
    remove_unfinished(env)
    # /tmp is in memory on many systems, and too small for the downloads.
    temporary = temporary_in(env)
    temporary.mkdir()
    settings = {**os.environ, "TMPDIR": str(temporary), "PIP_USER": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    cache = shutil.disk_usage(env).free >= 2 * KEPT * DOWNLOADED + KEPT
    command = [env / "bin" / "python", "-I", "-m", "pip", "install", *([] if cache else ["--no-cache-dir"]), "-e"]
    try:
        code, said = run([*command, ".[test]"], lock, cwd=root, env=settings)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    if code:
        raise SetUpError(cause_in(said))


def cause_in(said: str) -> str:
    """Translate what pip said into one sentence."""
    fitting = (sentence for signs, sentence in CAUSES if any(sign in said for sign in signs))
    return next(fitting, UNKNOWN_CAUSE)


def set_up(root: Path, install: Callable[[Path, TextIO], None] = install, keep_python: bool = True) -> None:
    """Make or update .venv, unless it is up to date.

    keep_python: an environment made with another Python is as good; False where the user named the one to use.
    """
    env, stamp = root / ".venv", stamp_of(root)
    with locked(root / ".venv.lock") as lock:
        python = python_in(env)
        if python and not keep_python and python != sys.version_info[:2]:
            python = None
        if python and up_to_date(root, python):
            return
        print("Setting up .venv from pyproject.toml: minutes the first time, seconds later.", flush=True)
        stamp.unlink(missing_ok=True)
        require_disk(env, usable=bool(python))
        if not python:
            create(env, lock)
        install(root, lock)
        stamp.write_text(fingerprint(root, python or sys.version_info[:2]))


def main(arguments: list[str]) -> int:
    if arguments == ["--check"]:
        return 0 if up_to_date(ROOT, sys.version_info[:2]) else 1
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        set_up(ROOT, keep_python=not os.environ.get("PYTHON"))
    except SetUpError as error:
        print(error, file=sys.stderr)
        return 1
    except OSError as error:
        print(f"The set-up failed: {error}.", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("The set-up was interrupted: run make again to finish it.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
