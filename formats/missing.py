"""Masks of missing values: one bit for each column of a row, in words of 64 columns.

A mask is uint64 [words, n]: column j is bit j % 64 of word j // 64. There is at least one word.
"""

from __future__ import annotations

import numpy as np

#: Columns in a word.
WORD_BITS = 64
_ONE = np.uint64(1)


def mask_words(columns: int) -> int:
    """Return the number of words of a mask for so many columns."""
    return max(1, -(-columns // WORD_BITS))


def empty_mask(columns: int, rows: int) -> np.ndarray:
    """Return a mask in which no value is missing."""
    return np.zeros((mask_words(columns), rows), np.uint64)


def bit_of(column: int) -> np.uint64:
    """Return the place of a column's bit in its word."""
    return np.uint64(column % WORD_BITS)


def word_of(mask: np.ndarray, column: int) -> np.ndarray:
    """Return the words that hold a column's bit, uint64 [n]."""
    return mask[column // WORD_BITS]


def is_missing(mask: np.ndarray, column: int) -> np.ndarray:
    """Return where a column is missing, bool [n]."""
    return (word_of(mask, column) >> bit_of(column)) & _ONE != 0


def add_missing(mask: np.ndarray, column: int, absent: np.ndarray) -> None:
    """Mark a column as missing where ``absent``, bool [n], is true."""
    mask[column // WORD_BITS] |= absent.astype(np.uint64) << bit_of(column)


def mask_of_rows(bits: list[int], columns: int) -> np.ndarray:
    """Return the mask of integers that have bit j set where column j of a row is missing."""
    if columns <= WORD_BITS:
        return np.array(bits, np.uint64)[np.newaxis]
    words, full = mask_words(columns), 2**WORD_BITS - 1
    return np.array(
        [[row >> (WORD_BITS * word) & full for row in bits] for word in range(words)], np.uint64
    )
