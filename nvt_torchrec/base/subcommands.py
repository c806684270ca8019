"""Programs with several commands, such as ``nvt-etl run`` and ``nvt-etl check``."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence

from nvt_torchrec.base.command_line import Parser, parse
from nvt_torchrec.base.errors import adapt_commands


def run_subcommand(
    prog: str,
    description: str | None,
    commands: Mapping[str, tuple[str, str]],
    argv: Sequence[str] | None,
) -> int | None:
    """Run the subcommand that a command line names, without importing the others.

    Args:
        prog: The command that starts the program, for example ``python -m etl``.
        description: The help of the program.
        commands: Name of a subcommand → its module and its help. The module has ``SETTINGS``
            (dataclasses), ``run``, which takes an instance of each, and optionally a longer help,
            ``DESCRIPTION``.
        argv: The command line; None for that of the process.

    Returns:
        The exit status that the subcommand's ``run`` returns.
    """
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] in commands:
        path, text = commands[argv[0]]
        module = importlib.import_module(path)
        text = getattr(module, "DESCRIPTION", f"{text[0].upper()}{text[1:]}.")
        parser = Parser(prog=f"{prog} {argv[0]}", description=text)
        try:
            return module.run(*parse(parser, argv[1:], *module.SETTINGS))
        except ModuleNotFoundError as error:
            from nvt_torchrec.base.versions import make_missing_error

            raise make_missing_error(error, path) from error
    parser = Parser(prog=prog, description=description)
    listed = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, (_, text) in commands.items():
        listed.add_parser(name, help=adapt_commands(text))
    parser.parse_args(argv)
    return None
