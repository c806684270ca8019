"""The wheel's long description: README without the links that only a checkout can follow.

Everything else is in pyproject.toml.
"""

import re
from pathlib import Path

from setuptools import setup


def drop_relative_links(text: str) -> str:
    """Turn links to files of the checkout, and to headings, into text; leave pictures out."""

    def write_out(link: re.Match[str]) -> str:
        words, target = link.groups()
        file = target.partition("#")[0]
        return words if words.rstrip("/") == file or not file else f"{words} ({file})"

    relative = r"\((?!\w+:)([^)]*)\)"
    text = re.sub(rf"!\[[^\]]*\]{relative}\n*", "", text)
    return re.sub(rf"\[([^\]]*)\]{relative}", write_out, text)


setup(
    long_description=drop_relative_links(Path("README.md").read_text(encoding="utf-8")),
    long_description_content_type="text/markdown",
)
