"""``python -m etl guess``: a first feature spec from the head of a file."""

from __future__ import annotations

import dataclasses
import logging
import shlex
from pathlib import Path

from nvt_torchrec.base.command_line import Settings, flag

log = logging.getLogger(__name__)

#: MiB of text that are read from the beginning of a file.
HEAD_MB = 8

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
        "a file of the log, or the directory or glob; local or URL", metavar="PATH", positional=True
    )
    output: Path | None = flag(
        "write the spec to this file (default: print it)", None, metavar="TOML"
    )
    label: str = flag(
        "the label's column, by its name or, from 1 on, its number; several with commas between "
        "(default: detected)", "", metavar="COLUMN"
    )
    delimiter: str = flag("delimiter of the fields (default: detected)", "")
    head_mb: int = flag("MiB of text to read from the beginning", HEAD_MB, least=1, most=1024)
    # fmt: on


SETTINGS = (GuessSettings,)


def guess(
    path: str, *, label: str = "", delimiter: str = "", head_mb: int = HEAD_MB
) -> tuple[str, list[str], str]:
    """Return a first spec for a log as TOML, flags of ``etl run`` for it, and what to look at.

    Args:
        path: A file of text, also compressed, or parquet, or a directory or glob of such files;
            local or a URL. Of a file that is a day of a log, the input is all of its days.
        label: The name of the label's column, or its number from 1 on, or several of these with
            commas between; "" to find it.
        delimiter: What is between the fields of text; "" to find it.
        head_mb: MiB of text to read from the beginning.

    Raises:
        BadInputError: The file cannot be read, or no column can be the label.
    """
    from nvt_torchrec.etl.guess.roles import assign
    from nvt_torchrec.etl.guess.sample import take_sample
    from nvt_torchrec.etl.guess.toml_text import to_toml

    sample = take_sample(path, head_mb << 20, delimiter)
    found = assign(sample, path, label)
    rule, why = found.labels[0]
    flags = ["--input_path", sample.days or path, "--output_path", "OUT"]
    if sample.malformed or any("malformed" in why for _, why in found.labels):
        flags += ["--on_bad_rows", "quarantine"]
    unread = ", ".join(list(found.unread)[:20]) + (" …" if len(found.unread) > 20 else "")
    says = f"not read, for the reasons at the end of the spec: {unread}\n" if unread else ""
    says += f"the label is {rule['name']}: "
    says += why.replace("; also possible", "; --label takes another")
    return to_toml(found, sample, path), flags, says


def run(settings: GuessSettings) -> None:
    """Print or write the spec.

    Raises:
        BadInputError: The file cannot be read, or no column can be the label.
        OutputError: The output is there already, or cannot be written.
    """
    from nvt_torchrec.base.errors import OutputError, as_called
    from nvt_torchrec.base.files.atomic import output_errors, write_text

    output, path = settings.output, settings.input_path
    if output and output.exists():
        raise OutputError(f"{output}: exists already", "choose another --output, or delete it")
    delimiter = settings.delimiter.replace("\\t", "\t")
    text, flags, says = guess(
        path, label=settings.label, delimiter=delimiter, head_mb=settings.head_mb
    )
    if output is None:
        print(text, end="")
        return
    with output_errors(output):
        write_text(output, text)
    log.info("wrote %s; review it, then run:", output)
    command = as_called("python -m etl run")
    log.info("%s %s", command, shlex.join(["--spec", str(output), *flags]))
    log.info(says)
