"""Errors that a user can act on: each names the file or setting, the value and the remedy.

Command lines turn a :class:`ClickLogError` into one message on stderr and exit status 2
(:func:`run_command`). Ctrl-C, too little memory and a full disk give one message too; a closed pipe
gives none. All other errors are defects of this project and keep their tracebacks.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

#: The top-level loggers of this project. On a command line they log at INFO, others at WARNING.
OUR_LOGGERS = ("nvt_torchrec", "demo")

#: How a program is started in a checkout → how it is started when only the wheel is installed.
_PROGRAMS = {
    "python -m etl": "nvt-etl",
    "python -m inference": "nvt-infer",
    "python -m workflows": "nvt-workflows",
    "python train_torchrec.py": "nvt-train",
    "--script train_torchrec.py": "-m nvt_torchrec.train_torchrec",
    "--nproc-per-node 8 train_torchrec.py": "--nproc-per-node 8 -m nvt_torchrec.train_torchrec",
}
#: Whether this package is part of a checkout.
IS_CHECKOUT = (Path(__file__).parents[2] / "requirements").is_dir()


def adapt_commands(text: str) -> str:
    """Replace the commands in a text, written for a checkout, by those of an installed package."""
    if not IS_CHECKOUT or Path("".join(sys.argv[:1])).name.startswith("nvt-"):
        for program, command in _PROGRAMS.items():
            text = text.replace(program, command)
    return text


class ClickLogError(Exception):
    """Base class of errors that are caused by the input or the caller, not by a defect.

    Args:
        what: The error, with the file, row or column and the value.
        remedy: What to do about it.
    """

    def __init__(self, what: str, remedy: str = "") -> None:
        super().__init__(what, remedy)  # both in args, so that the error can be pickled (by Dask)
        self.what = adapt_commands(what)
        self.remedy = adapt_commands(remedy)

    def __str__(self) -> str:
        return f"{self.what}\n  -> {self.remedy}" if self.remedy else self.what


class BadInputError(ClickLogError):
    """A file that is missing, empty, truncated or malformed."""


class BadRowError(BadInputError):
    """A row of a raw log that breaks the feature spec."""


class SchemaError(ClickLogError):
    """Data, tables, a workflow or a checkpoint that do not match each other."""


class SettingsError(ClickLogError):
    """An invalid setting or combination of settings."""


class UnregisteredError(SettingsError):
    """A name in a file under which no class is registered, such as a user's own class."""


class OutputError(ClickLogError):
    """An output path that cannot be written, or that is already in use."""


def run_command(main: Callable[[], int | None]) -> int:
    """Run the ``main`` of a command line, with log messages on stderr; see :func:`run_main`."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    for name in OUR_LOGGERS:
        logging.getLogger(name).setLevel(logging.INFO)
    return run_main(main)


def end_process(status: int) -> NoReturn:
    """End this process without freeing its memory, which would take up to half a second.

    Functions that are registered with ``atexit`` are called. Output must have been flushed, as
    :func:`run_main` does.
    """
    atexit._run_exitfuncs()
    os._exit(status)


def run_main(main: Callable[[], int | None], report: Callable[[str], object] | None = None) -> int:
    """Run ``main`` and return its exit status; report expected errors in one message.

    Args:
        main: Returns the exit status; None means 0.
        report: Prints a message; None to print to stderr.

    Returns:
        The status that ``main`` returned; 2 after a :class:`ClickLogError`, too little memory or
        a full disk; 130 after Ctrl-C; 141, without a message, if the reader of the output closed
        the pipe. All other errors are raised.
    """
    from nvt_torchrec.base import interrupts

    report = report or interrupts.print_error
    try:
        try:
            status = main() or 0
        except SystemExit:  # argparse has printed help
            interrupts.flush()
            raise
        interrupts.flush()  # a closed pipe can no longer be handled when Python exits
        return status
    except ClickLogError as error:
        report(f"error: {error}")
        return 2
    except BaseException as error:
        ended = interrupts.report_end(error, report)
        if ended is None:
            raise
        return ended
