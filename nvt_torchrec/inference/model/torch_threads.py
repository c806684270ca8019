"""Set the number of threads that PyTorch uses, for the calling thread alone."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterator

import torch

#: Up to this number of rows are scored by one thread. A second thread has to be woken up, and if
#: other programs use the cores, the first one waits for it: one row took 40 to 60 ms instead of
#: 0.2 ms. On two idle cores, in ms (26 tables, `OMP_WAIT_POLICY=passive`):
#:
#:     layers                          rows   one thread   two threads
#:     512-256-64 and 512-512-256-1       1         0.20          0.31
#:                                       64          1.5           1.8
#:                                      128          3.0           3.0
#:                                      256          6.0           5.0
#:     64-16 and 64-1                 1,024          5.6           6.1
ONE_THREAD_ROWS = 128


@contextlib.contextmanager
def use_one_thread() -> Iterator[None]:
    """Let PyTorch compute in the calling thread alone, without changing the setting of others.

    ``torch.set_num_threads`` would change it: a thread that uses PyTorch for the first time adopts
    the number that was set last, and keeps it for its lifetime.
    """
    # In a new thread this call makes PyTorch adopt the process's number, which would overwrite the
    # setting below. So it comes first.
    before = torch.get_num_threads()
    set_openmp, set_mkl = _find_setters()
    set_openmp(1)
    before_mkl = set_mkl(1)
    try:
        yield
    finally:
        set_openmp(before)
        set_mkl(before_mkl)


def limit_threads(rows: int) -> contextlib.AbstractContextManager[None]:
    """Let PyTorch compute in one thread if there are at most :data:`ONE_THREAD_ROWS` rows."""
    return use_one_thread() if rows <= ONE_THREAD_ROWS else contextlib.nullcontext()


@functools.cache
def _find_setters() -> list[Callable[[int], int]]:
    """Return the functions of OpenMP and MKL that set the number of threads of the calling thread.

    They are looked up through PyTorch's library, because a process may contain several copies of
    OpenMP. A library that PyTorch is built without gets a function that does nothing.
    """
    libraries = ctypes.PyDLL(torch._C.__file__)
    setters = []
    for name in ("omp_set_num_threads", "MKL_Set_Num_Threads_Local"):
        setters.append(getattr(libraries, name, lambda _: 0))
    return setters
