"""Run the recipes of docs/recipes on synthetic look-alikes of the logs, and print what they reach.

    python -m benchmarks.recipes [NAME …] [--rows N]

The commands are those of the pages, with smaller batches and layers, as the look-alikes are small.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from benchmarks.recipes.pages import recipes
from benchmarks.recipes.run import run_recipe


def main(argv: list[str] | None = None) -> int:
    """Run the recipes; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recipes", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="recipes (default: all)")
    parser.add_argument("--rows", type=int, default=20_000, help="rows of the log")
    options = parser.parse_args(argv)
    unknown = set(options.names) - set(recipes())
    if unknown:
        parser.error(f"no recipe {', '.join(sorted(unknown))}; there are {', '.join(recipes())}")
    print("| synthetic look-alike | rows | AUROC of test |\n|---|---|---|")
    for name in options.names or recipes():
        with tempfile.TemporaryDirectory() as directory:
            found = run_recipe(name, Path(directory), options.rows)
        print(f"| `{name}` | {options.rows:,} | {found.auroc['test']:.3f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
