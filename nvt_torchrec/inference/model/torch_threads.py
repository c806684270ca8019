"""How many threads PyTorch uses, set for the calling thread alone."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterator

import torch

#: Up to so many rows are scored by one thread. A further one has to be woken, and while other
#: programs use the cores, all wait for it: one row took 40 to 60 ms instead of 0.2. On two idle
#: cores, one thread against two, in ms (26 tables, `OMP_WAIT_POLICY=passive`): of layers 512-256-64
#: and 512-512-256-1, 1 row 0.20 against 0.31, 64 rows 1.5 against 1.8, 128 rows 3.0 against 3.0,
#: 256 rows 6.0 against 5.0; of layers 64-16 and 64-1, 1,024 rows 5.6 against 6.1.
ONE_THREAD_ROWS = 128


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Compute in the calling thread alone, without changing the numbers of other threads.

    ``torch.set_num_threads`` would change them: a thread that uses PyTorch for the first time takes
    over the number that was set last, and keeps it for as long as it lives.
    """
    # In a new thread this call also takes over the process's number, so it comes first.
    before = torch.get_num_threads()
    set_openmp, set_mkl = _setters()
    set_openmp(1)
    before_mkl = set_mkl(1)
    try:
        yield
    finally:
        set_openmp(before)
        set_mkl(before_mkl)


def threads_for(rows: int) -> contextlib.AbstractContextManager[None]:
    """Compute in one thread if the rows are few, see :data:`ONE_THREAD_ROWS`."""
    return one_thread() if rows <= ONE_THREAD_ROWS else contextlib.nullcontext()


@functools.cache
def _setters() -> list[Callable[[int], int]]:
    """Return the functions of OpenMP and of MKL that set the calling thread's number.

    They are looked up in PyTorch's library, so that they are those of the copies that it uses. One
    that it is built without is replaced by a function that does nothing.
    """
    libraries = ctypes.PyDLL(torch._C.__file__)
    setters = []
    for name in ("omp_set_num_threads", "MKL_Set_Num_Threads_Local"):
        setters.append(getattr(libraries, name, lambda _: 0))
    return setters
