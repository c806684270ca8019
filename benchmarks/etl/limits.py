"""Measure a part of the ETL alone: reading bytes, parsing, or writing parquet.

Prints rows/s of that part, without the start of the process and without compilation.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow.parquet as pq

from nvt_torchrec.clicklog.readers.raw import Block, find_days, open_day, read_block, read_bytes
from nvt_torchrec.etl.parquet import write_part
from nvt_torchrec.formats.spec.toml_file import load_spec

_BLOCK = 8 << 20


def main() -> None:
    """Measure one part and print its JSON line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=("read", "parse", "write"))
    parser.add_argument("--input", required=True, help="the raw log")
    parser.add_argument("--output", type=Path, help="a finished output to write again")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--rows", type=int, required=True, help="rows of the log")
    args = parser.parse_args()
    seconds = _write(args) if args.part == "write" else _over_blocks(args)
    print(json.dumps({"rows_per_s": args.rows / seconds}))


def _over_blocks(args: argparse.Namespace) -> float:
    spec = load_spec()
    blocks = []
    for day in find_days(args.input):
        blocks += open_day(day, spec).cut(0, day.size, _BLOCK)

    def read(block: Block) -> int:
        return len(read_bytes(block.path, block.begin, block.end))

    def parse(block: Block) -> int:
        return len(read_block(block, spec))

    function = read if args.part == "read" else parse
    function(blocks[0])  # compiles
    return _timed(function, blocks, args.threads)


def _write(args: argparse.Namespace) -> float:
    target = args.output / "written_again"
    files = sorted((args.output / "criteo_binary" / "split").glob("*/*.parquet"))
    tables = [(pq.ParquetFile(f).read(), target / f"{i}.parquet") for i, f in enumerate(files)]

    try:
        return _timed(lambda part: write_part(*part), tables, args.threads)
    finally:
        shutil.rmtree(target, ignore_errors=True)


def _timed(function: Callable, items: Iterable, threads: int) -> float:
    begin = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(function, items):
            pass
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
