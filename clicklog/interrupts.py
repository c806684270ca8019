"""Ends that are no defect: Ctrl-C, too little memory, a pipe that nobody reads any more.

Command lines import this module before anything that takes time to import: from then on each of
these ends is told in one message, or in none, instead of a traceback. What they do after that runs
in :func:`clicklog.errors.run_command`.
"""

from __future__ import annotations

import _thread
import errno
import os
import sys
import time
from types import TracebackType

#: As shells name the ends by SIGINT and SIGPIPE, and as all errors end that the user can mend.
INTERRUPTED, NOT_READ, OUT_OF_MEMORY = 130, 141, 2

#: What libraries say that have no error of their own for it.
_NO_MEMORY = (
    "cannot allocate memory", "can't allocate memory", "not enough memory", "std::bad_alloc",
    "cuda out of memory", "can't start new thread", "failed to map segment from shared object",
)  # fmt: skip

_MAIN_THREAD = _thread.get_ident()
#: Whether Ctrl-C came where Python could not raise it: an import in C makes another error of it.
_interrupted = False


def ending(error: BaseException) -> tuple[int, str] | None:
    """Exit status and message ("": none) of an error that is no defect; else None."""
    if isinstance(error, KeyboardInterrupt) or (_interrupted and isinstance(error, ImportError)):
        return INTERRUPTED, "" if _interrupted else "interrupted"
    if isinstance(error, BrokenPipeError) and not _is_read():
        return NOT_READ, ""
    if is_memory(error):
        return OUT_OF_MEMORY, _memory_message(error)
    return None


def is_memory(error: BaseException | None) -> bool:
    """Whether it is an error of too little memory, or was raised from one."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
            return True
        if isinstance(error, RuntimeError | ImportError | OSError):
            text = str(error).lower()
            if any(words in text for words in _NO_MEMORY):
                return True
        # Not what was merely being handled when a defect came, except by libraries' own wrappers.
        wrapper = isinstance(error, ImportError | OSError | SystemError)
        error = error.__cause__ or (error.__context__ if wrapper else None)
    return False


def _memory_message(error: BaseException) -> str:
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    said = "" if limit == resource.RLIM_INFINITY else f" (`ulimit -v` allows {limit >> 20:,} MiB)"
    detail = str(error).strip().split("\n")[0]
    what = f"out of memory{said}{f': {detail}' if detail else ''}"
    return (
        f"error: {what}\n  -> free some, raise the limit, or ask for less at once: fewer workers "
        "or ranks, smaller blocks or batches"
    )


def _is_read() -> bool:
    """Whether somebody still reads what goes to stdout and stderr."""
    import select

    poll = select.poll()
    for descriptor in (1, 2):
        poll.register(descriptor, 0)
    return not any(event & select.POLLERR for _, event in poll.poll(0))


def say(message: str) -> None:
    """Print to stderr, if that is still there."""
    try:  # noqa: SIM105  # contextlib takes longer to import than all of this
        print(message, file=sys.stderr, flush=True)
    except OSError:
        pass


def flush() -> None:
    """Write what ``print`` has kept so far. Raises BrokenPipeError if nobody reads it."""
    if sys.stdout is not None and not sys.stdout.closed:
        sys.stdout.flush()


def drop_output() -> None:
    """Nobody reads stdout: so that Python does not fail to write it once more at its end."""
    try:  # noqa: SIM105
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError, AttributeError):  # stdout is no file
        pass


def _excepthook(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    global _interrupted
    end = ending(error)
    if end is None:
        sys.__excepthook__(kind, error, trace)
        return
    status, message = end
    if message:
        say(message)
    if status == NOT_READ:
        drop_output()
    # C code that cannot go on for Ctrl-C calls this, too, and then raises an error of its own.
    _interrupted = _interrupted or status == INTERRUPTED


def _unraisablehook(unraisable: sys.UnraisableHookArgs) -> None:
    """Ctrl-C in a destructor, which Python would tell and drop, comes again; see _excepthook."""
    if isinstance(unraisable.exc_value, KeyboardInterrupt):
        _thread.start_new_thread(_interrupt_again, ())
    elif not isinstance(unraisable.exc_value, BrokenPipeError):  # at the end, of stdout
        sys.__unraisablehook__(unraisable)


def _interrupt_again() -> None:
    import signal

    time.sleep(0.01)  # until the destructor is left
    signal.pthread_kill(_MAIN_THREAD, signal.SIGINT)


sys.excepthook = _excepthook
sys.unraisablehook = _unraisablehook
#: From here on.
READY = True
