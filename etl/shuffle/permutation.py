"""A keyed pseudo-random permutation of [0, n), evaluated element by element in constant memory.

A Feistel network on pairs (left, right) of numbers below a = ⌈√n⌉ permutes [0, a²); walking along
its cycle until the result is below n makes it a permutation of [0, n), with hardly ever a second
step as a² < n + 2√n + 1. Both are from Black and Rogaway, "Ciphers with Arbitrary Finite Domains"
(CT-RSA 2002). Luby and Rackoff (1988) show that four rounds with random round functions cannot be
told from a random permutation; here are eight, with a mixing function that is only good.
"""

from __future__ import annotations

import math

import numba
import numpy as np

from nvt_torchrec.base.kernels import compiled

ROUNDS = 8


def round_keys(*seed: int) -> np.ndarray:
    """uint64 [ROUNDS] from non-negative integers, by NumPy's ``SeedSequence``."""
    return np.random.SeedSequence(seed).generate_state(ROUNDS, np.uint64)


def permute(begin: int, end: int, n: int, keys: np.ndarray) -> np.ndarray:
    """The images of ``begin … end - 1`` under the permutation of [0, n) that ``keys`` select.

    Args:
        begin, end: 0 ≤ begin ≤ end ≤ n.
        n: size of the domain, below 2**62.
        keys: uint64 [ROUNDS]; see :func:`round_keys`.

    Returns:
        int64 [end - begin].
    """
    side = math.isqrt(max(n - 1, 0)) + 1
    return _permute(begin, end, np.uint64(n), np.uint64(side), keys)


@compiled()
def _permute(begin, end, n, side, keys):
    images = np.empty(end - begin, np.int64)
    for i in range(end - begin):
        x = np.uint64(begin + i)
        while True:
            left, right = x // side, x % side
            for key in keys:
                # a 32-bit hash, scaled to [0, side) by a multiplication
                mixed = ((mix(right ^ key) >> np.uint64(32)) * side) >> np.uint64(32)
                mixed += left
                if mixed >= side:
                    mixed -= side
                left, right = right, mixed
            x = left * side + right
            if x < n:
                break
        images[i] = np.int64(x)
    return images


@numba.njit(inline="always")
def mix(x):
    """The finalizer of MurmurHash3 (Appleby): every bit in moves about half of the bits out."""
    x = (x ^ (x >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    x = (x ^ (x >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    return x ^ (x >> np.uint64(33))
