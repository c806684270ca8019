"""Handle Ctrl-C, too little memory, full disks, long paths and closed pipes without tracebacks.

Command lines import this module before modules that take time to import; its hooks apply from then
on. The command itself runs in :func:`base.errors.run_command`, which handles the same errors.
"""

from __future__ import annotations

import errno
import os
import resource  # imported early: when memory is short, loading it may fail
import sys
from _collections_abc import Callable  # already loaded, unlike collections.abc
from types import TracebackType

#: The exit statuses of SIGINT and SIGPIPE, as shells report them.
INTERRUPTED = 130
PIPE_CLOSED = 141
#: The exit status of all errors that a user can act on.
OUT_OF_MEMORY = 2
DISK_FULL = 2
#: What to do about errors of the system that any command can meet.
_REMEDIES = {
    errno.ENOSPC: "free space there, or write elsewhere",
    errno.EDQUOT: "free space there, or write elsewhere",
    errno.ENAMETOOLONG: "give a shorter path",
}

#: Messages of libraries that report too little memory by an error of another type.
_NO_MEMORY = (
    "cannot allocate memory", "can't allocate memory", "not enough memory", "std::bad_alloc",
    "cuda out of memory", "can't start new thread", "failed to map segment from shared object",
)  # fmt: skip

#: Whether Ctrl-C came during an import in C code, which then raises an ImportError.
_interrupted = False


def classify_end(error: BaseException) -> tuple[int, str] | None:
    """Return the exit status and message of an error that is not a defect; None for a defect.

    The message is "" if nothing should be printed.
    """
    if isinstance(error, KeyboardInterrupt) or (_interrupted and isinstance(error, ImportError)):
        return INTERRUPTED, "" if _interrupted else "interrupted"
    if isinstance(error, BrokenPipeError) and not _has_readers():
        return PIPE_CLOSED, ""
    if is_out_of_memory(error):
        return OUT_OF_MEMORY, _format_memory_message(error)
    if isinstance(error, OSError) and error.errno in _REMEDIES:
        what = f"{error.filename or 'the output'}: {error.strerror}"
        return DISK_FULL, f"error: {what}\n  -> {_REMEDIES[error.errno]}"
    return None


def report_end(error: BaseException, report: Callable[[str], object]) -> int | None:
    """Report an error that is not a defect; return the exit status, None for a defect."""
    end = classify_end(error)
    if end is None:
        return None
    status, message = end
    if message:
        report(message)
    if isinstance(error, OSError):  # if it is about stdout, Python's flush at exit would fail, too
        discard_output()
    return status


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether an error, or one that caused it, means too little memory."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
            return True
        if isinstance(error, RuntimeError | ImportError | OSError):
            text = str(error).lower()
            if any(words in text for words in _NO_MEMORY):
                return True
        # The context is followed only for the types of errors in which libraries wrap others. An
        # error of another type that was raised while one was handled is a defect.
        may_wrap = isinstance(error, ImportError | OSError | SystemError)
        error = error.__cause__ or (error.__context__ if may_wrap else None)
    return False


def _format_memory_message(error: BaseException) -> str:
    """Return the message about too little memory, with the limit of the shell and the details."""
    what = "out of memory"
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        what += f" (`ulimit -v` allows {limit >> 20:,} MiB)"
    detail = str(error).strip().split("\n")[0]
    if detail:
        what += f": {detail}"
    return (
        f"error: {what}\n  -> free some, raise the limit, or ask for less at once: fewer workers "
        "or ranks, smaller blocks or batches"
    )


def _has_readers() -> bool:
    """Return whether stdout and stderr are still open at the other end."""
    import select

    poll = select.poll()
    for descriptor in (1, 2):
        poll.register(descriptor, 0)
    return not any(event & select.POLLERR for _, event in poll.poll(0))


def print_error(message: str) -> None:
    """Print to stderr, if it is still open."""
    try:  # noqa: SIM105  # contextlib takes longer to import than all of this
        print(message, file=sys.stderr, flush=True)
    except OSError:
        pass


def flush() -> None:
    """Flush stdout. Raises BrokenPipeError if its reader has closed the pipe."""
    if sys.stdout is not None and not sys.stdout.closed:
        sys.stdout.flush()


def discard_output() -> None:
    """Redirect stdout to the null device, so that Python can flush it when it exits."""
    try:  # noqa: SIM105
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError, AttributeError):  # stdout is not a file
        pass


def _excepthook(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    global _interrupted
    status = report_end(error, print_error)
    if status is None:
        sys.__excepthook__(kind, error, trace)
    # C code that is interrupted by Ctrl-C calls this hook, too, and then raises another error.
    if status == INTERRUPTED:
        _interrupted = True


def _unraisablehook(unraisable: sys.UnraisableHookArgs) -> None:
    if not isinstance(unraisable.exc_value, BrokenPipeError):  # raised for stdout at exit
        sys.__unraisablehook__(unraisable)


sys.excepthook = _excepthook
sys.unraisablehook = _unraisablehook
