"""Text in another encoding than UTF-8."""

from __future__ import annotations


def as_utf8(text: bytes | memoryview, encoding: str) -> bytes | memoryview:
    """Return text in one of the encodings of a spec as UTF-8, which is not checked."""
    if encoding == "utf-8":
        return text
    return bytes(text).decode(encoding).encode()
