"""Raw rows, a saved workflow and a checkpoint → click probabilities."""

from __future__ import annotations

import clicklog.interrupts  # noqa: F401  # before all that takes time: Ctrl-C is one line now

# isort: split
import argparse
import dataclasses
import faulthandler
import functools
import json
import os
import signal
import sys
import time
from pathlib import Path

from clicklog.errors import OutputError, SettingsError, run_command
from inference.server.settings import ServerSettings


def main(argv: list[str] | None = None) -> int:
    """Run a subcommand; returns the exit status."""
    return run_command(lambda: _run(argv))


def _run(argv: list[str] | None) -> int | None:
    parser = argparse.ArgumentParser(prog="python -m inference", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_predict(commands)
    _add_bundle(commands)
    _add_serve(commands)
    _add_export(commands)
    _add_benchmark(commands)
    args = parser.parse_args(argv)
    return args.function(args)


def _add_model(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--bundle", type=Path, metavar="BUNDLE", help="made by `python -m inference bundle`; or")
    add("--workflow", type=Path, metavar="OUT/workflow", help="saved workflow, and")
    add("--checkpoint", type=Path, metavar="CKPT", help="training checkpoint, of any world size")
    add("--device", default="cpu", help="where the model runs: cpu (default), cuda, cuda:1 …")
    _add_tables(parser, None, "the bundle's, float32 of a checkpoint")
    add(
        "--skip_digests",
        action="store_true",
        help="open a bundle or workflow without comparing its files with their digests: they are "
        "not read first, and a damaged one is not noticed",
    )


def _add_tables(parser: argparse.ArgumentParser, default: str | None, text: str) -> None:
    kinds = ("float32", "float16", "int8")
    parser.add_argument(
        "--tables", choices=kinds, default=default, help=f"type of the embeddings; default: {text}"
    )


def _add_predict(commands) -> None:
    parser = commands.add_parser(
        "predict", help="raw rows → parquet of click probabilities, in the order of the rows"
    )
    _add_model(parser)
    add = parser.add_argument
    add(
        "--input",
        required=True,
        metavar="FILE",
        help="raw rows, with or without labels: TSV, CSV (also compressed), parquet; local or URL",
    )
    add("--output", required=True, type=Path, metavar="PARQUET", help="file to write")
    add(
        "--format",
        choices=("tsv", "csv", "parquet"),
        help="of the input; default: the training log's, or parquet if it is called so",
    )
    add(
        "--id_columns", default="", metavar="A,B", help="columns of the input to copy to the output"
    )
    add(
        "--on_bad_rows",
        choices=("error", "quarantine"),
        default="error",
        help="stop at the first malformed row (default), or write such rows to "
        "OUTPUT.rejected.tsv and go on",
    )
    add("--workers", type=int, metavar="N", help="threads; default: as many as there are cores")
    parser.epilog = "Several devices share the work: --device cuda:0,cuda:1"
    add("--resume", action="store_true", help="go on where an interrupted run with this output was")
    add("--evaluate", action="store_true", help="print metrics; the rows must have labels")
    parser.set_defaults(function=_predict)


def _add_bundle(commands) -> None:
    parser = commands.add_parser(
        "bundle", help="workflow and checkpoint → one directory that can be moved"
    )
    add = parser.add_argument
    add("--workflow", required=True, type=Path, metavar="OUT/workflow", help="saved workflow")
    add("--checkpoint", required=True, type=Path, metavar="CKPT", help="training checkpoint")
    add("--output", required=True, type=Path, metavar="BUNDLE", help="directory to make")
    _add_tables(parser, "float32", "float32")
    add(
        "--evaluate",
        metavar="FILE",
        help="labelled raw rows: print what --tables costs in AUROC, beside float32",
    )
    add("--format", choices=("tsv", "csv", "parquet"), help="of FILE")
    parser.set_defaults(function=_bundle)


def _add_serve(commands) -> None:
    parser = commands.add_parser("serve", help="answer requests over HTTP: JSON in, JSON out")
    _add_model(parser)
    default = ServerSettings()
    for name, kind, text in (
        ("host", str, "address to listen on; default: this machine only"),
        ("port", int, "0: any free one"),
        ("workers", int, "processes that answer; they share a bundle's memory"),
        ("batch_rows", int, "that go through the model at once, at most"),
        ("batch_delay_ms", float, "how long a request may wait for others to share its batch"),
        ("max_rows", int, "of a request; 413 beyond it"),
        ("max_body_mb", float, "MiB of a request; 413 beyond it"),
        ("max_requests", int, "arrived and not answered yet; 503 beyond it"),
        ("max_wait_ms", float, "that a new request may have to wait for others; 503 beyond it"),
        ("max_connections", int, "open at once; beyond it idle ones are closed"),
        ("max_client_connections", int, "likewise of one client"),
        ("timeout_s", float, "from a request's first byte to the answer; 408 or 503 beyond it"),
        ("idle_s", float, "that a connection may stay open without a request"),
        ("drain_s", float, "after SIGTERM, serve on for so long while /ready says no"),
    ):
        value = getattr(default, name)
        metavar = None if kind is str else "N"
        parser.add_argument(
            f"--{name}", type=kind, default=value, metavar=metavar, help=f"{text} ({value})"
        )
    add = parser.add_argument
    add("--api_key_file", type=Path, metavar="FILE", help="an API key a line; 401 without one")
    add("--tls_cert", type=Path, metavar="PEM", help="certificate and chain: serve HTTPS")
    add("--tls_key", type=Path, metavar="PEM", help="its private key; default: in --tls_cert")
    add(
        "--trusted_proxies",
        default="",
        metavar="A,B",
        help="addresses or networks whose X-Forwarded-For says who the client is",
    )
    add("--access_log", action="store_true", help="a line of JSON on stdout for each request")
    add("--otel", action="store_true", help="trace requests; needs OpenTelemetry's packages")
    parser.set_defaults(function=_serve)


def _add_export(commands) -> None:
    parser = commands.add_parser("export", help="a bundle for other programs")
    add = parser.add_argument
    add("--bundle", required=True, type=Path, metavar="BUNDLE", help="made by `bundle`")
    add(
        "--format",
        required=True,
        choices=("torch", "triton", "nvidia"),
        help="torch: one file that PyTorch alone runs, from raw integers to the probability; "
        "triton: a model repository for Triton Inference Server; nvidia: feature_spec.yaml and "
        "encoded rows for NVIDIA's DLRM",
    )
    add("--output", required=True, type=Path, metavar="DIR", help="directory to make")
    add("--compile", action="store_true", help="torch: also by AOTInductor; takes a C++ compiler")
    for mapping in ("train", "test"):
        add(f"--{mapping}", metavar="FILE", help=f"nvidia: raw rows that become {mapping}/")
    add("--input_format", choices=("tsv", "csv", "parquet"), help="nvidia: of these rows")
    parser.set_defaults(function=_export)


def _add_benchmark(commands) -> None:
    parser = commands.add_parser(
        "benchmark", help="latency and rows/s by batch size, beside Workflow.transform"
    )
    _add_model(parser)
    add = parser.add_argument
    add("--input", required=True, metavar="FILE", help="raw rows to measure with")
    add("--format", choices=("tsv", "csv", "parquet"), help="of the input")
    add("--batch_sizes", default="1,64,4096", metavar="N,N", help="default: 1,64,4096")
    add("--seconds", type=float, default=2.0, help="time for each measurement; default: 2")
    add("--json", type=Path, metavar="FILE", help="write the results there, too")
    parser.set_defaults(function=_benchmark)


def _load(args: argparse.Namespace, *, check: bool = True):
    """The predictor that ``--bundle``, or ``--workflow`` and ``--checkpoint``, name."""
    given = (args.bundle is not None, args.workflow is not None, args.checkpoint is not None)
    if given not in ((True, False, False), (False, True, True)):
        raise SettingsError(
            "no model, or two", "pass --bundle, or both --workflow and --checkpoint"
        )
    # a mapped file that is cut short in the wrong moment: say "Bus error", and where
    faulthandler.enable(sys.__stderr__)
    from dlrm.launch.startup import prepare_torch

    prepare_torch()
    from inference.predictor import Predictor

    return Predictor.load(
        args.bundle or args.workflow,
        args.checkpoint,
        device=args.device,
        tables=args.tables,
        check=check and not args.skip_digests,
    )


def _predict(args: argparse.Namespace) -> None:
    if args.workers is not None and args.workers < 1:
        raise SettingsError(f"--workers {args.workers}", "at least one thread is needed")
    args.device, *others = args.device.split(",")
    predictor = _load(args)
    from inference.bulk import evaluate_file, predict_file

    begin = time.perf_counter()
    scored = predict_file(
        predictor,
        args.input,
        args.output,
        replicas=[predictor.on(device) for device in others],
        file_format=args.format,
        id_columns=tuple(filter(None, args.id_columns.split(","))),
        reject=args.on_bad_rows == "quarantine",
        need_label=args.evaluate,
        workers=args.workers,
        resume=args.resume,
    )
    seconds = time.perf_counter() - begin
    rejected = f", {scored.rejected} rejected" if scored.rejected else ""
    print(f"{scored.rows} rows scored{rejected} in {seconds:.1f} s: {args.output}")
    if args.evaluate:
        print(json.dumps(dataclasses.asdict(evaluate_file(args.output))))


def _bundle(args: argparse.Namespace) -> None:
    from dlrm.launch.startup import prepare_torch

    prepare_torch()
    from inference.model.bundle import write_bundle

    write_bundle(args.workflow, args.checkpoint, args.output, tables=args.tables)
    size = sum(file.stat().st_size for file in args.output.rglob("*") if file.is_file())
    print(f"{args.output}: {size / 2**20:.1f} MiB")
    if args.evaluate is not None:
        from inference.accuracy import compare, table
        from inference.predictor import Predictor

        predictors = {"float32": Predictor.load(args.workflow, args.checkpoint)}
        predictors[args.tables] = Predictor.load(args.output)
        print(table(compare(predictors, args.evaluate, args.format)))


def _serve(args: argparse.Namespace) -> int | None:
    fields = dataclasses.fields(ServerSettings)
    settings = ServerSettings(**{field.name: getattr(args, field.name) for field in fields})
    from inference.server.access import ApiKeys
    from inference.server.sockets import listen, tls_context, url

    if settings.api_key_file is not None:  # so that it is said before anything is loaded
        ApiKeys(settings.api_key_file)
    if settings.tls_cert is not None:
        tls_context(settings.tls_cert, settings.tls_key)

    def started(listener) -> None:
        print(f"serving on {url(listener, tls=settings.tls_cert is not None)}", flush=True)

    if settings.workers > 1:
        for flag in ("workflow", "checkpoint", "tables"):
            if getattr(args, flag) is not None:
                raise SettingsError(
                    f"--{flag} with --workers {settings.workers}: each would have its own copy",
                    "make a bundle of it, which they share: python -m inference bundle",
                )
        from inference.__main__ import _load as load  # in a worker __main__ is another module
        from inference.server.workers import serve_in_workers

        del args.function  # likewise
        return serve_in_workers(functools.partial(load, args), settings, started)
    # until there is anything to be answered; imports might swallow an exception
    before = signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    if settings.reloads:  # its files have not been read yet
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        predictor = _load(args)
        from inference.server.run import serve

        with listen(settings) as listener:
            serve(predictor, settings, listener, started=lambda: started(listener))
    finally:
        signal.signal(signal.SIGTERM, before)
    return None


def _export(args: argparse.Namespace) -> None:
    if args.output.exists():
        raise OutputError(f"{args.output} exists", "choose another --output, or remove it first")
    logs = {mapping: path for mapping in ("train", "test") if (path := getattr(args, mapping))}
    wrong = {"--compile": args.compile and args.format != "torch"}
    wrong |= {f"--{mapping}": args.format != "nvidia" for mapping in logs}
    for flag in (flag for flag, is_wrong in wrong.items() if is_wrong):
        raise SettingsError(f"{flag} with --format {args.format}", "leave it out")
    from dlrm.launch.startup import prepare_torch

    prepare_torch()
    if args.format == "torch":
        from inference.export.torch_package import export_torch

        export_torch(args.bundle, args.output, compiled=args.compile)
    elif args.format == "triton":
        from inference.export.triton import export_triton

        export_triton(args.bundle, args.output)
    else:
        from inference.export.nvidia import export_nvidia

        for mapping, rows in export_nvidia(
            args.bundle, args.output, logs, args.input_format
        ).items():
            print(f"{mapping}: {rows} rows")
    print(f"{args.format}: {args.output}")


def _benchmark(args: argparse.Namespace) -> None:
    try:
        sizes = [int(size) for size in args.batch_sizes.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1:
        raise SettingsError(f"--batch_sizes {args.batch_sizes}", "positive integers, as 1,64,4096")
    predictor = _load(args)
    from inference.benchmark import run_benchmark

    run_benchmark(predictor, args, sizes)


if __name__ == "__main__":
    sys.exit(main())
