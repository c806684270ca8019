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

#: Default of ``--head_mb``: MiB of text to read from the beginning of a file.
HEAD_MB = 8
#: Unread columns that are named on one line of output; the spec lists all of them.
_MAX_UNREAD = 20

#: For the command's help.
DESCRIPTION = (
    "Read the head of a log (text or JSON lines, also compressed, or parquet), and write a feature "
    "spec for it: the format, the type of each column, a label, a split, and comments that say "
    "why. The spec can be used at once, but review it first; docs/specs.md explains the keys."
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
        "column of the label, by name or by number from 1; separate several by commas "
        "(default: detected)", "", metavar="COLUMN"
    )
    delimiter: str = flag("delimiter between fields (default: detected)", "")
    events: bool = flag(
        "add features of what happened before each row; the log needs a time, users and items "
        "(docs/events.md)", False
    )
    tables: tuple[str, ...] = flag(
        "tables to join: files with attributes of the users, the items or another key of the log "
        "(docs/tables.md)", (), metavar="PATH,…"
    )
    head_mb: int = flag("MiB of text to read from the beginning", HEAD_MB, minimum=1, maximum=1024)
    # fmt: on


SETTINGS = (GuessSettings,)


@dataclasses.dataclass(frozen=True)
class GuessedSpec:
    """A guessed spec, and notes for its review.

    Attributes:
        text: The spec as TOML.
        flags: The flags with which ``etl run`` reads the log by it.
        label_candidates: The columns that could equally be the label, the chosen one first; [] if
            there is no doubt.
        notes: Notes for the review, one per line.
        unread: The columns that the spec does not read, each with the reason.
    """

    text: str
    flags: list[str]
    label_candidates: list[str]
    notes: str
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
    """Return a first spec for a log as TOML, the flags of ``etl run`` for it, and review notes.

    Args:
        path: A file of text, also compressed, or parquet, or a directory or glob of such files;
            local or a URL. If the file is one day of a log, the flags read all days of the log.
        label: The name of the label's column, its number from 1, or several of these separated by
            commas; "" to detect it.
        delimiter: The delimiter between the fields of text; "" to detect it.
        head_mb: MiB of text to read from the beginning.
        events: Whether the spec has features of what happened before each row.
        tables: Files of tables to join to the log.

    Raises:
        BadInputError: The file cannot be read, no column can be the label, events are asked for but
            the log does not allow them, or a table has no key of the log.
    """
    guessed = guess_spec(path, label, delimiter, head_mb, events=events, tables=tables)
    return guessed.text, guessed.flags, guessed.notes


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
    """Guess a first spec for a log.

    Args:
        path: See :func:`guess`.
        label: See :func:`guess`.
        delimiter: See :func:`guess`.
        head_mb: See :func:`guess`.
        events: See :func:`guess`.
        split: Shares and seed of ``[split]``, instead of guessed ones.
        outcomes: Whether to leave out columns that give the label away.
        tables: See :func:`guess`.

    Raises:
        BadInputError: See :func:`guess`.
    """
    from nvt_torchrec.base.errors import BadInputError
    from nvt_torchrec.etl.guess.roles import assign_roles
    from nvt_torchrec.etl.guess.sample import take_sample
    from nvt_torchrec.etl.guess.tables_of_log import add_table
    from nvt_torchrec.etl.guess.toml_text import comment_events, propose_events, to_toml

    sample = take_sample(path, head_mb << 20, delimiter)
    found = assign_roles(sample, path, label, outcomes=outcomes)
    if split:
        found = dataclasses.replace(found, split=found.split.override(split))
    proposed = propose_events(found, sample)
    guessed_tables = []
    for table_path in tables:
        table_sample = take_sample(table_path, head_mb << 20)
        found, table = add_table(found, sample, table_sample, table_path)
        guessed_tables.append(table)
    if events and not proposed:
        raise BadInputError(
            f"{path}: cannot add [events]: they need a time that no row lacks, a column named for "
            "users, another category with repeated values, and a split by days, time or files",
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
    notes = []
    if found.unread:
        unread = ", ".join(list(found.unread)[:_MAX_UNREAD])
        if len(found.unread) > _MAX_UNREAD:
            unread += " …"
        notes.append(f"not read, for the reasons at the end of the spec: {unread}")
    if sample.quoted_breaks:
        notes.append(
            f"{sample.quoted_breaks} lines end within quotes, in the middle of a value: convert "
            "the log to parquet, otherwise their rows are left out"
        )
    if proposed and not events:
        notes.append("what happened before a row may predict more than its ids: --events adds it")
    rule, why = found.labels[0]
    why = why.replace("; also possible", "; --label chooses another")
    notes.append(f"the label is {rule['name']}: {why}")
    lines = comment_events(proposed, wanted=events)
    text = to_toml(found, sample, path, events=lines, tables=guessed_tables)
    return GuessedSpec(text, flags, found.label_candidates, "\n".join(notes), found.unread)


def run(settings: GuessSettings) -> None:
    """Print or write the spec.

    Raises:
        BadInputError: See :func:`guess`.
        OutputError: The output exists already, or cannot be written.
    """
    from nvt_torchrec.base.errors import OutputError, adapt_commands
    from nvt_torchrec.base.files.atomic import output_errors, write_text

    output = settings.output
    if output and output.exists():
        raise OutputError(f"{output}: exists already", "choose another --output, or delete it")
    guessed = _guess_with_label(settings, settings.label)
    candidates = guessed.label_candidates
    if candidates:
        chosen = candidates[0]
        log.warning("column %s could be the label:", " or ".join(candidates))
        if sys.stdin and sys.stdin.isatty() and sys.stderr.isatty():
            chosen = _ask_label(candidates)
            if chosen != candidates[0]:
                guessed = _guess_with_label(settings, chosen)
        else:
            for label in candidates:
                log.warning("  %s", _format_command(settings, label))
        log.warning("the spec uses %s", chosen)
    if output is None:
        print(guessed.text, end="")
        return
    with output_errors(output):
        write_text(output, guessed.text)
    log.info("wrote %s; review it, then run:", output)
    command = adapt_commands("python -m etl run")
    log.info("%s %s", command, shlex.join(["--spec", str(output), *guessed.flags]))
    log.info(guessed.notes)


def _guess_with_label(settings: GuessSettings, label: str) -> GuessedSpec:
    """Guess a spec by the settings, but with this label."""
    delimiter = settings.delimiter.replace("\\t", "\t")
    return guess_spec(
        settings.input_path,
        label,
        delimiter,
        settings.head_mb,
        events=settings.events,
        tables=settings.tables,
    )


def _format_command(settings: GuessSettings, label: str) -> str:
    """Return the command that guesses with this label, and writes to a separate file."""
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


def _ask_label(labels: list[str]) -> str:
    """Ask at the terminal which column is the label; an empty answer chooses the first one."""
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
