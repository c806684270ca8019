"""Show the roles of Sphinx in docstrings, such as :meth:`fit`, as code; an extension of Griffe."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":[a-z]+:`~?([^`]+)`")


class SphinxRoles(griffe.Extension):
    """Rewrite each docstring as it is read."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Keep the name in a role, without the role."""
        if obj.docstring is not None:
            obj.docstring.value = _ROLE.sub(r"`\1`", obj.docstring.value)
