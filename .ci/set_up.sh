#!/bin/sh
# Brings .venv up to date: finds a Python that really runs, then lets set_up.py do the work.
# PYTHON=… names the Python to use; without it the first that fits is taken.
CDPATH= cd -- "$(dirname -- "$0")/.." || exit 1

if [ -z "${PYTHON-}" ] && [ -x .venv/bin/python ] && .venv/bin/python -I -S .ci/set_up.py --check 2>/dev/null; then
    exit 0
fi

if [ -n "${PYTHON-}" ]; then
    set -- "$PYTHON"
else
    set -- python3.13 python3.12 python3.11 python3 python3.14
fi
without_venv=
for python in "$@"; do
    # A command that exists may still not run: pyenv's stand-ins fail for a version that is not activated.
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 || continue
    if "$python" -c 'import ensurepip, venv' 2>/dev/null; then
        exec "$python" -I .ci/set_up.py
    fi
    without_venv=${without_venv:-$python}
done

if [ -n "$without_venv" ]; then
    echo "$without_venv lacks the modules venv and ensurepip: install them (on Debian and Ubuntu: sudo apt install python3-venv), then run make again." >&2
elif [ -n "${PYTHON-}" ]; then
    echo "PYTHON=$PYTHON is not a Python 3.11 or newer that runs here: name another, or leave PYTHON out." >&2
else
    echo "DDP Lab needs Python 3.11 or newer and none of these runs here: $*; install one, or name it: make lab PYTHON=/path/to/python3." >&2
fi
exit 1
