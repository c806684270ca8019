"""Several GPUs on paper: what a step sends between them, and how fast training could be.

A model of one step, from what one card does and from link speeds; nothing is measured here. All
tables lie table-wise, each on one rank, the largest first: to the rank with fewest of them, which
evens out lookups and messages, or (--balance memory) to the one that holds least. The trainer's
own plan: `train_torchrec.py --plan_only --world_size 8`. In a step of B samples per rank
on W ranks, each rank sends

- the ids of its samples to the ranks with their tables: B · T · (W-1)/W · id bytes;
- forward, the embeddings of its own tables for all others' samples, and backward their gradients:
  2 · B · T · (W-1)/W · D · embedding bytes in the mean, more where tables are spread unevenly;
- the gradients of the dense layers in a ring: 2 · P · (W-1)/W · 4 bytes.

A step takes the time of one card for B samples, on the rank with most tables that part of it that
lookups take as often as it has more tables than the mean; and the messages, less what is hidden
behind it. The truth lies between "no overlap" and "full overlap".
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys

from nvt_torchrec.base.command_line import Parser, Settings, flag, parse
from nvt_torchrec.base.errors import run_command
from nvt_torchrec.clicklog.synthetic.model import MLPERF_CARDINALITIES


@dataclasses.dataclass(frozen=True)
class Paper(Settings):
    """The figures that the model computes with. Each field is a flag."""

    # fmt: off
    ranks: int = flag("GPUs of one machine", 8, least=1)
    batch: int = flag("samples per rank and step", 65536, least=1)
    samples_per_s: float = flag(
        "what one card trains, at this batch size, with all tables (measured)", 4.1e6, above=0
    )
    lookup_share: float = flag(
        "share of that time spent on tables (measured; a profile shows it)", 0.4, least=0, most=1
    )
    link_gb_s: float = flag(
        "GB/s that a card sends while it receives as much, as advertised", 450.0, above=0
    )
    link_share: float = flag("share of it that NCCL reaches in an all-to-all", 0.7, above=0)
    dim: int = flag("width of the embeddings", 128, least=1)
    embedding_bytes: int = flag("bytes of a number in a message", 4, least=1)
    id_bytes: int = flag("bytes of an id in a message", 4, least=1)
    dense_parameters: int = flag("number of parameters of the dense layers", 2_368_897, least=0)
    text_gb_s: float = flag(
        "GB/s of raw text of one card's ETL (measured); 0 leaves the ETL out", 0.0, least=0
    )
    disk_gb_s: float = flag("GB/s of the storage that all cards read from", 25.0, above=0)
    balance: str = flag(
        "assign tables to cards by their number or by their memory", "tables",
        choices=("tables", "memory")
    )
    sizes: tuple[int, ...] = flag(
        "rows of the tables (default: MLPerf's)", MLPERF_CARDINALITIES, least=1
    )
    # fmt: on


@dataclasses.dataclass(frozen=True)
class PrintSettings(Settings):
    """How to print the results."""

    json: bool = flag("print the results as JSON", False)


def assign(sizes: tuple[int, ...], ranks: int, balance: str) -> list[list[int]]:
    """Tables by rank: the largest first, to the rank with fewest ("tables") or least ("memory")."""
    assigned: list[list[int]] = [[] for _ in range(ranks)]

    def load(own: list[int]) -> tuple[int, int]:
        memory = sum(sizes[i] for i in own)
        return (memory, len(own)) if balance == "memory" else (len(own), memory)

    for table in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        min(assigned, key=load).append(table)
    return assigned


def messages(paper: Paper, tables: list[list[int]]) -> dict[str, float]:
    """Bytes that a rank sends in a step: the mean of the ids, else the rank that sends most."""
    others = (paper.ranks - 1) / paper.ranks
    most = max(len(own) for own in tables)
    whole = paper.batch * paper.ranks  # samples of all ranks
    embeddings = whole * most * others * paper.dim * paper.embedding_bytes
    return {
        "ids": paper.batch * len(paper.sizes) * others * paper.id_bytes,
        "embeddings forward": embeddings,
        "gradients backward": embeddings,
        "dense gradients": 2 * paper.dense_parameters * others * 4,
    }


def predict(paper: Paper) -> dict[str, object]:
    """The step's parts in seconds and samples/s of all ranks, without and with full overlap."""
    tables = assign(paper.sizes, paper.ranks, paper.balance)
    sent = messages(paper, tables)
    alone = paper.batch / paper.samples_per_s
    uneven = max(len(own) for own in tables) * paper.ranks / len(paper.sizes)
    compute = alone * (1 - paper.lookup_share) + alone * paper.lookup_share * uneven
    link = sum(sent.values()) / (paper.link_gb_s * 1e9 * paper.link_share)
    whole = paper.batch * paper.ranks
    found: dict[str, object] = {
        "gib_per_rank": [
            sum(paper.sizes[i] for i in own) * paper.dim * 4 / 2**30 for own in tables
        ],
        "tables_per_rank": [len(own) for own in tables],
        "mb_per_step": {name: size / 1e6 for name, size in sent.items()},
        "compute_ms": 1e3 * compute,
        "messages_ms": 1e3 * link,
        "samples_per_s": {
            "no overlap": whole / (compute + link),
            "full overlap": whole / max(compute, link),
            "one card": paper.samples_per_s,
        },
    }
    if paper.text_gb_s:
        found["etl_text_gb_s"] = min(paper.ranks * paper.text_gb_s, paper.disk_gb_s)
    return found


def _text(paper: Paper, found: dict) -> str:
    lines = [
        f"{paper.ranks} ranks, {paper.batch} samples each, {len(paper.sizes)} tables of dim "
        f"{paper.dim}, {paper.samples_per_s / 1e6:g} M samples/s alone, "
        f"{paper.link_gb_s:g} GB/s x {paper.link_share:g} between cards",
        "GiB of tables per rank: " + " ".join(f"{gib:.1f}" for gib in found["gib_per_rank"]),
        "tables per rank: " + " ".join(map(str, found["tables_per_rank"])),
        "MB that a rank sends in a step: "
        + ", ".join(f"{name} {size:,.1f}" for name, size in found["mb_per_step"].items()),
        f"compute {found['compute_ms']:.2f} ms, messages {found['messages_ms']:.2f} ms",
    ]
    for name, rate in found["samples_per_s"].items():
        lines.append(f"  {name:12} {rate / 1e6:8.2f} M samples/s")
    if "etl_text_gb_s" in found:
        lines.append(f"ETL: {found['etl_text_gb_s']:.1f} GB/s of text")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    """Print the model for the numbers given."""
    parser = Parser(
        prog="python -m benchmarks.gpu.paper",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    paper, settings = parse(parser, argv, Paper, PrintSettings)
    found = predict(paper)
    print(json.dumps(found) if settings.json else _text(paper, found))


if __name__ == "__main__":
    sys.exit(run_command(main))
