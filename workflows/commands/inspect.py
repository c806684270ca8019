"""``python -m workflows inspect``: describe a saved workflow."""

from __future__ import annotations

from workflows.commands.saved import SavedWorkflow

SETTINGS = (SavedWorkflow,)


def run(saved: SavedWorkflow) -> None:
    """Print operators, vocabularies, statistics and sizes."""
    from workflows.report import report

    saved.verify()
    print(report(saved.workflow))
