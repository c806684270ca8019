"""``python -m etl guess``: a first feature spec from the head of a file."""

from __future__ import annotations

import dataclasses
import logging
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from nvt_torchrec.base.command_line import Settings, flag

log = logging.getLogger(__name__)

#: MiB of text that are read from the beginning of a file.
HEAD_MB = 8
#: Columns that are not read and that a line names; the spec names all of them.
_MAX_UNREAD = 20

#: For the command's help.
DESCRIPTION = (
    "Reads the head of a file (text or JSON lines, also compressed, or parquet), and writes a "
    "feature spec for it: its format, the type of each column, a label, a split, and comments that "
    "say why. The spec can be used at once, but review it first; docs/specs.md explains the keys."
)


@dataclasses.dataclass(frozen=True)
class GuessSettings(Settings):
    """The settings of ``python -m etl guess``."""

    # fmt: off
    input_path: str = flag(
        "a file, directory or glob of the log; local or URL", metavar="PATH", positional=True
    )
    output: Path | None = flag(
        "write the spec to this file (default: print it)", None, metavar="TOML"
    )
    label: str = flag(
        "the label's column, by its name or its number from 1; several with commas between "
        "(default: detected)", "", metavar="COLUMN"
    )
    delimiter: str = flag("delimiter of the fields (default: detected)", "")
    events: bool = flag(
        "add what happened before each row, of a log with a time, users and items; "
        "docs/events.md", False
    )
    tables: tuple[str, ...] = flag(
        "files of tables with what is known of a user, an item or another key of the log; "
        "docs/tables.md", (), metavar="PATH,…"
    )
    head_mb: int = flag("MiB of text to read from the beginning", HEAD_MB, minimum=1, maximum=1024)
    # fmt: on


SETTINGS = (GuessSettings,)


@dataclasses.dataclass(frozen=True)
class GuessedSpec:
    """A spec, and what there is to say of it.

    Attributes:
        text: The spec as TOML.
        flags: Those of ``etl run`` for it.
        close: The columns of which each could be the label, the one taken first; [] without doubt.
        says: What to look at, in lines.
        unread: The columns that the spec does not read, each with the reason.
    """

    text: str
    flags: list[str]
    close: list[str]
    says: str
    unread: Mapping[str, str]


def guess(
    path: str,
    *,
    label: str = "",
    delimiter: str = "",
    head_mb: int = HEAD_MB,
    events: bool = False,
    tables: Sequence[str] = (),
) -> tuple[str, list[str], str]:
    """Return a first spec for a log as TOML, flags of ``etl run`` for it, and what to look at.

    Args:
        path: A file of text, also compressed, or parquet, or a directory or glob of such files;
            local or a URL. Of a file that is a day of a log, the input is all of its days.
        label: The name of the label's column, or its number from 1 on, or several of these with
            commas between; "" to find it.
        delimiter: What is between the fields of text; "" to find it.
        head_mb: MiB of text to read from the beginning.
        events: Whether the spec counts what happened before a row.
        tables: Files of tables that are joined to the log.

    Raises:
        BadInputError: The file cannot be read, no column can be the label, there are no events, or
            a table has no key of the log.
    """
    made = guess_spec(path, label, delimiter, head_mb, events=events, tables=tables)
    return made.text, made.flags, made.says


def guess_spec(
    path: str,
    label: str,
    delimiter: str,
    head_mb: int,
    *,
    events: bool,
    split: Mapping[str, float] | None = None,
    outcomes: bool = True,
    tables: Sequence[str] = (),
) -> GuessedSpec:
    """Return a first spec; see :func:`guess`.

    Args:
        path: See :func:`guess`; so are label, delimiter, head_mb and events.
        label: Names of columns.
        delimiter: Of text.
        head_mb: MiB of text.
        events: Whether there are events.
        split: Shares and the seed of ``[split]``, in the place of what is guessed.
        outcomes: Whether columns that give the label away are left out.
        tables: Files of tables.
    """
    from nvt_torchrec.base.errors import BadInputError
    from nvt_torchrec.etl.guess.roles import assign
    from nvt_torchrec.etl.guess.sample import take_sample
    from nvt_torchrec.etl.guess.tables_of_log import add_table
    from nvt_torchrec.etl.guess.toml_text import comment_events, propose_events, to_toml

    sample = take_sample(path, head_mb << 20, delimiter)
    found = assign(sample, path, label, outcomes=outcomes)
    if split:
        found = dataclasses.replace(found, split=found.split.change(split))
    proposed = propose_events(found, sample)
    guessed_tables = []
    for table_path in tables:
        table_sample = take_sample(table_path, head_mb << 20)
        found, table = add_table(found, sample, table_sample, table_path)
        guessed_tables.append(table)
    if events and not proposed:
        raise BadInputError(
            f"{path}: no [events]: they need a time that no row lacks, a column named for users, "
            "another category with repeated values, and a split by days, time or files",
            "leave --events out, or write the block by hand as docs/events.md shows",
        )
    flags = ["--input_path", found.split.input_path or path, "--output_path", "OUT"]
    table_paths = []
    for table, table_path in zip(guessed_tables, tables, strict=True):
        table_paths.append(f"{table.keys['name']}={table_path}")
    if table_paths:
        flags += ["--table", ",".join(table_paths)]
    if sample.malformed or any("malformed" in why for _, why in found.labels):
        flags += ["--on_bad_rows", "quarantine"]
    says = []
    if found.unread:
        unread = ", ".join(list(found.unread)[:_MAX_UNREAD])
        if len(found.unread) > _MAX_UNREAD:
            unread += " …"
        says.append(f"not read, for the reasons at the end of the spec: {unread}")
    if sample.quoted_breaks:
        says.append(
            f"{sample.quoted_breaks} lines end within quotes, in the middle of a value: write the "
            "log as parquet, or their rows are left out"
        )
    if proposed and not events:
        says.append("what happened before a row may say more than its ids: --events counts it")
    rule, why = found.labels[0]
    why = why.replace("; also possible", "; --label takes another")
    says.append(f"the label is {rule['name']}: {why}")
    lines = comment_events(proposed, wanted=events)
    text = to_toml(found, sample, path, events=lines, tables=guessed_tables)
    return GuessedSpec(text, flags, found.close, "\n".join(says), found.unread)


def run(settings: GuessSettings) -> None:
    """Print or write the spec.

    Raises:
        BadInputError: The file cannot be read, no column can be the label, or there are no events.
        OutputError: The output is there already, or cannot be written.
    """
    from nvt_torchrec.base.errors import OutputError, adapt_commands
    from nvt_torchrec.base.files.atomic import output_errors, write_text

    output = settings.output
    if output and output.exists():
        raise OutputError(f"{output}: exists already", "choose another --output, or delete it")
    made = _guess_as_set(settings, settings.label)
    if made.close:
        taken = made.close[0]
        log.warning("column %s could be the label:", " or ".join(made.close))
        if sys.stdin and sys.stdin.isatty() and sys.stderr.isatty():
            taken = _ask(made.close)
            if taken != made.close[0]:
                made = _guess_as_set(settings, taken)
        else:
            for label in made.close:
                log.warning("  %s", _command(settings, label))
        log.warning("taken is %s", taken)
    if output is None:
        print(made.text, end="")
        return
    with output_errors(output):
        write_text(output, made.text)
    log.info("wrote %s; review it, then run:", output)
    command = adapt_commands("python -m etl run")
    log.info("%s %s", command, shlex.join(["--spec", str(output), *made.flags]))
    log.info(made.says)


def _guess_as_set(settings: GuessSettings, label: str) -> GuessedSpec:
    delimiter = settings.delimiter.replace("\\t", "\t")
    return guess_spec(
        settings.input_path,
        label,
        delimiter,
        settings.head_mb,
        events=settings.events,
        tables=settings.tables,
    )


def _command(settings: GuessSettings, label: str) -> str:
    """Return the command that takes a label, into a file of its own."""
    from nvt_torchrec.base.errors import adapt_commands

    words = [settings.input_path, "--label", label]
    if settings.delimiter:
        words += ["--delimiter", settings.delimiter]
    if settings.head_mb != HEAD_MB:
        words += ["--head_mb", str(settings.head_mb)]
    if settings.events:
        words.append("--events")
    if settings.tables:
        words += ["--tables", ",".join(settings.tables)]
    if settings.output:
        name = re.sub(r"\W", "_", label)
        words += ["--output", str(settings.output.with_stem(f"{settings.output.stem}-{name}"))]
    return f"{adapt_commands('python -m etl guess')} {shlex.join(words)}"


def _ask(labels: list[str]) -> str:
    """Return which of some labels somebody at a terminal takes; the first one without an answer."""
    for number, label in enumerate(labels, 1):
        log.warning("  %d  %s", number, label)
    while True:
        print("Which is the label? [1] ", end="", file=sys.stderr, flush=True)
        answer = sys.stdin.readline().strip()
        if not answer:
            return labels[0]
        if answer in map(str, range(1, len(labels) + 1)):
            return labels[int(answer) - 1]
        if answer in labels:
            return answer
        log.warning("give a number from 1 to %d", len(labels))
