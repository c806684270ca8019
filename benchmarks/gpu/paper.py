"""Several GPUs on paper: what a step sends between them, and how fast training could be.

A model of one step, from what one card does and from link speeds; nothing is measured here. All
tables lie table-wise, each on one rank, the largest first: to the rank with fewest of them, which
evens out lookups and messages, or (--balance memory) to the one that holds least. The trainer's
own plan: `train_torchrec.py --plan_only --world_size 8`. In a step of B samples per rank
on W ranks, each rank sends

- the ids of its samples to the ranks with their tables: B · T · (W-1)/W · id bytes;
- forward, the embeddings of its own tables for all others' samples, and backward their gradients:
  2 · B · T · (W-1)/W · D · embedding bytes in the mean, more where tables are unevenly dealt;
- the gradients of the dense layers in a ring: 2 · P · (W-1)/W · 4 bytes.

A step takes the time of one card for B samples, on the rank with most tables that part of it that
lookups take as often as it has more tables than the mean; and the messages, less what is hidden
behind it. The truth lies between "no overlap" and "full overlap".
"""

from __future__ import annotations

import argparse
import dataclasses
import json

from clicklog.synthetic.model import MLPERF_CARDINALITIES


@dataclasses.dataclass(frozen=True)
class Paper:
    """What the model is told.

    Attributes:
        ranks: GPUs of one machine.
        batch: samples per rank and step.
        samples_per_s: what one card trains, at this batch size, with all tables (measured).
        lookup_share: of that time, what is spent on tables (measured; a profile shows it).
        link_gb_s: GB/s that a card sends while it receives as much, as advertised.
        link_share: of it that NCCL reaches in an all-to-all.
        dim: of the embeddings.
        embedding_bytes: of a number in a message.
        id_bytes: of an id in a message.
        dense_parameters: of the dense layers.
        text_gb_s: of raw text that one card's ETL does (measured); 0 leaves the ETL out.
        disk_gb_s: of the storage that all cards read from.
        balance: what the tables are dealt by: "tables" or "memory".
        sizes: rows of the tables.
    """

    ranks: int = 8
    batch: int = 65536
    samples_per_s: float = 4.1e6
    lookup_share: float = 0.4
    link_gb_s: float = 450.0
    link_share: float = 0.7
    dim: int = 128
    embedding_bytes: int = 4
    id_bytes: int = 4
    dense_parameters: int = 2_368_897
    text_gb_s: float = 0.0
    disk_gb_s: float = 25.0
    balance: str = "tables"
    sizes: tuple[int, ...] = MLPERF_CARDINALITIES


def deal(sizes: tuple[int, ...], ranks: int, balance: str) -> list[list[int]]:
    """Tables by rank: the largest first, to the rank with fewest ("tables") or least ("memory")."""
    dealt: list[list[int]] = [[] for _ in range(ranks)]

    def load(own: list[int]) -> tuple[int, int]:
        memory = sum(sizes[i] for i in own)
        return (memory, len(own)) if balance == "memory" else (len(own), memory)

    for table in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        min(dealt, key=load).append(table)
    return dealt


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
    tables = deal(paper.sizes, paper.ranks, paper.balance)
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
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.paper",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for field in dataclasses.fields(Paper):
        if field.name == "sizes":
            continue
        options = {"type": type(field.default), "default": field.default}
        if field.name == "balance":
            options["choices"] = ("tables", "memory")
        parser.add_argument(f"--{field.name}", help="(default: %(default)s)", **options)
    parser.add_argument("--sizes", help="rows of the tables, comma separated (default: MLPerf's)")
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    values = vars(parser.parse_args(argv))
    as_json, sizes = values.pop("json"), values.pop("sizes")
    if sizes:
        values["sizes"] = tuple(int(size) for size in sizes.split(","))
    paper = Paper(**values)
    found = predict(paper)
    print(json.dumps(found) if as_json else _text(paper, found))


if __name__ == "__main__":
    main()
