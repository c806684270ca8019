"""Run a command line with Ctrl-C at one of its imports: ``interrupted.py N COMMAND ARGUMENTS``.

The signal comes at the N-th import after :mod:`base.interrupts`, which commands import first.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys


class Interrupts:
    """An import hook that finds nothing."""

    left = int(sys.argv[1])

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Count, and interrupt."""
        ready = sys.unraisablehook is not sys.__unraisablehook__  # the last hook that it sets
        Interrupts.left -= ready
        if ready and not Interrupts.left:
            os.kill(os.getpid(), signal.SIGINT)


sys.path.insert(0, os.getcwd())
sys.meta_path.insert(0, Interrupts())
command = sys.argv[2]
sys.argv = sys.argv[2:]
if command.endswith(".py"):
    runpy.run_path(command, run_name="__main__")
else:
    sys.argv[0] = "-m"  # as Python sets it while it imports the command's package
    runpy.run_module(command, run_name="__main__", alter_sys=True)
