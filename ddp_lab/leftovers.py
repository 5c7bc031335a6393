"""For the server of `fast_start`: when the notebook is gone, however it ended, the folder of its sockets goes too.

The notebook's process removes it when it ends by itself. Jupyter, the memory killer or a closed terminal may end it
without a chance to, and the server, which ends a moment later, is then the only one left that can.
"""

import atexit
import os
import shutil
import signal

FOLDER = "DDP_LAB_FOLDER"


def _outlive_the_notebook(folder: str) -> None:
    """Remove the folder at the end, which is when the notebook's pipe closes and not when a signal comes.

    Jupyter sends SIGTERM to all children of a kernel that still runs, and SIGKILL to its process group.
    """
    server = os.getpid()
    os.setpgid(0, 0)
    atexit.register(lambda: os.getpid() == server and shutil.rmtree(folder, ignore_errors=True))
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))  # a rank must end of it


if FOLDER in os.environ:
    _outlive_the_notebook(os.environ[FOLDER])
