"""Command lines made of dataclasses: each field that :func:`flag` declares is an argument.

A declaration holds everything that is known of a setting: its default, its help, its range and what
it depends on. The annotation of the field gives the type. :func:`check`, called in
``__post_init__``, enforces the declarations, so settings that are made in Python are checked like
those of a command line.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import importlib
import math
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from clicklog.errors import SettingsError

_LARGEST = sys.float_info.max


@dataclasses.dataclass(frozen=True)
class Rules:
    """What :func:`flag` declares beside name, type and default.

    Attributes:
        text: The help. The default is appended to it, unless it names one.
        least: The smallest number allowed; of a tuple, each number counts.
        above: A bound below all numbers that are allowed.
        most: The largest number allowed; ``math.inf`` allows infinity, too.
        choices: The values allowed.
        needs: The flag, or flag and value, without which this setting has no effect, for example
            ``--mode train``.
        also: A second name of the flag.
        group: The heading of the help below which the argument stands.
        metavar: The name of the value in the help.
        parse: Makes the value of the text; by default, the type of the field does.
        positional: The argument is recognized by its position instead of its name.
    """

    text: str
    least: float = -_LARGEST
    above: float = -math.inf
    most: float = _LARGEST
    choices: tuple[str, ...] = ()
    needs: str = ""
    also: str = ""
    group: str = ""
    metavar: str = ""
    parse: Callable[[str], Any] | None = None
    positional: bool = False


def flag(text: str, default: Any = dataclasses.MISSING, **rules: Any) -> Any:
    """Declare a field of a dataclass that is also an argument of a command line.

    Args:
        text: The help.
        default: The default, or a function that returns it. Without one the argument is required.
        rules: The other attributes of :class:`Rules`.
    """
    given = {"default_factory" if callable(default) else "default": default}
    return dataclasses.field(**given, metadata={"rules": Rules(text, **rules)})


def check(settings: Any) -> None:
    """Check each field of a dataclass against its declaration.

    Raises:
        SettingsError: A value is not allowed, or has no effect beside the other values.
    """
    fields = _declared(type(settings))
    for field, rules in fields:
        value = getattr(settings, field.name)
        if value is None:
            continue
        if rules.choices and value not in rules.choices:
            raise SettingsError(f"--{field.name} {value}", f"one of {', '.join(rules.choices)}")
        numbers = value if isinstance(value, tuple) else (value,)
        wrong = [number for number in numbers if _is_number(number) and not _fits(number, rules)]
        if wrong or (value == () and rules.least > -_LARGEST):
            raise SettingsError(f"--{field.name} {as_text(value)}", _range(rules, value))
    for field, rules in fields:
        if rules.needs and getattr(settings, field.name) != _default(field):
            _check_need(settings, field.name, rules.needs)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _fits(number: float, rules: Rules) -> bool:
    return number > rules.above and rules.least <= number <= rules.most


def _range(rules: Rules, value: Any) -> str:
    bounds = [
        text
        for text, is_set in (
            (f"at least {rules.least}", rules.least > -_LARGEST),
            (f"above {rules.above}", rules.above > -math.inf),
            (f"at most {rules.most}", rules.most < _LARGEST),
        )
        if is_set
    ]
    what = "each number must be" if isinstance(value, tuple) else "it must be"
    return f"{what} {' and '.join(bounds) or 'finite'}"


def _check_need(settings: Any, name: str, needs: str) -> None:
    switch, _, value = needs.removeprefix("--").partition(" ")
    now = getattr(settings, switch)
    default = next(
        _default(field) for field, _ in _declared(type(settings)) if field.name == switch
    )
    if now == value if value else now != default:
        return
    given = getattr(settings, name)
    given = "" if given is True else f" {as_text(given)}"
    raise SettingsError(
        f"--{name}{given} has no effect without {needs}", f"add {needs}, or leave --{name} out"
    )


def as_text(value: Any) -> Any:
    """A value as it is written after its flag."""
    return ",".join(map(str, value)) if isinstance(value, tuple) else value


def _declared(settings_class: type) -> list[tuple[dataclasses.Field, Rules]]:
    fields = dataclasses.fields(settings_class)
    return [(field, field.metadata["rules"]) for field in fields if "rules" in field.metadata]


def _default(field: dataclasses.Field) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


class Parser(argparse.ArgumentParser):
    """A parser whose errors are :class:`SettingsError`, and that leaves defaults to dataclasses."""

    def __init__(self, **options: Any) -> None:
        super().__init__(argument_default=argparse.SUPPRESS, **options)

    def error(self, message: str) -> NoReturn:
        """Raise the message as :class:`SettingsError`."""
        raise SettingsError(message, f"see: {self.prog} --help")

    def flags(self) -> set[str]:
        """Return all flags but ``--help``, second names included."""
        names = {name for action in self._actions for name in action.option_strings}
        return {name for name in names if name.startswith("--")} - {"--help"}


class _Once(argparse.Action):
    """Keep the last value of a flag; refuse two names of one flag with different values."""

    _by: str | None = None

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        before = getattr(namespace, self.dest, values)
        if self._by not in (None, option_string) and before != values:
            raise SettingsError(
                f"{self._by} {before} and {option_string} {values} are one setting",
                f"give it once, as {self.option_strings[0]}",
            )
        self._by = option_string
        setattr(namespace, self.dest, values)


def integers(text: str) -> tuple[int, ...]:
    """``"512,256"`` → (512, 256)."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a comma-separated list of integers"
        ) from None


def words(text: str) -> tuple[str, ...]:
    """``"a,b"`` → ("a", "b")."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


#: Type of a field → what makes it of text, and the name of the value in the help.
_TYPES: dict[Any, tuple[Callable[[str], Any], str]] = {
    int: (int, "N"),
    float: (float, "X"),
    str: (str, "TEXT"),
    Path: (Path, "PATH"),
    tuple[int, ...]: (integers, "N,N,…"),
    tuple[str, ...]: (words, "A,B,…"),
}


def add_arguments(parser: Parser, *settings_classes: type) -> None:
    """Add an argument for each declared field of the dataclasses."""
    groups: dict[str, Any] = {"": parser}
    for settings_class in settings_classes:
        hints = typing.get_type_hints(settings_class)
        for field, rules in _declared(settings_class):
            if rules.group not in groups:
                groups[rules.group] = parser.add_argument_group(rules.group)
            _add(groups[rules.group], field, rules, hints[field.name])


def _add(group: Any, field: dataclasses.Field, rules: Rules, hint: Any) -> None:
    if isinstance(hint, types.UnionType):
        hint = next(kind for kind in typing.get_args(hint) if kind is not types.NoneType)
    default, text = _default(field) if hint in _TYPES else None, rules.text
    if default not in (dataclasses.MISSING, None, "", ()) and "default" not in text:
        text += f" (default: {_short(default)})"
    text = text.replace("%", "%%")
    names = [f"--{name}" for name in (field.name, rules.also) if name]
    if hint is bool:
        group.add_argument(*names, action="store_true", help=text)
        return
    parse, metavar = _TYPES.get(hint, (rules.parse, "TEXT"))
    options: dict[str, Any] = {"help": text, "type": rules.parse or parse}
    if rules.choices and hint is str:
        options["choices"] = rules.choices
    else:
        options["metavar"] = rules.metavar or metavar
    required = default is dataclasses.MISSING
    if rules.positional:
        group.add_argument(field.name, nargs=None if required else "?", **options)
    else:
        group.add_argument(*names, dest=field.name, action=_Once, required=required, **options)


def _short(value: Any) -> Any:
    if isinstance(value, tuple) and len(value) > 5 and len(set(value)) == 1:
        return f"{len(value)} times {value[0]}"
    return as_text(value)


def parse(
    parser: Parser,
    argv: Sequence[str],
    *settings_classes: type,
    hints: Mapping[str, str] = types.MappingProxyType({}),
) -> list[Any]:
    """Parse a command line into one instance of each dataclass.

    Args:
        parser: A parser without arguments, or with arguments that are of no dataclass.
        argv: The command line.
        settings_classes: Dataclasses whose declared fields are the arguments.
        hints: What to say of flags that are unknown here, by flag.

    Raises:
        SettingsError: An argument is unknown (with the one that was probably meant), missing, or
            has a value that is not allowed.
    """
    add_arguments(parser, *settings_classes)
    args, unknown = parser.parse_known_args(list(argv))
    if unknown:
        name = unknown[0].split("=")[0]
        close = difflib.get_close_matches(name, parser.flags(), n=1)
        guess = f"did you mean {close[0]}?" if close else f"see: {parser.prog} --help"
        raise SettingsError(f"unknown argument {unknown[0]}", hints.get(name, guess))
    return [
        settings_class(
            **{
                field.name: getattr(args, field.name)
                for field, _ in _declared(settings_class)
                if hasattr(args, field.name)
            }
        )
        for settings_class in settings_classes
    ]


def run_subcommand(
    prog: str,
    description: str | None,
    commands: Mapping[str, tuple[str, str]],
    argv: Sequence[str] | None,
) -> int | None:
    """Run the subcommand that a command line names; import no other.

    Args:
        prog: How the program is called, for example ``python -m etl``.
        description: The help of the program.
        commands: Name of a subcommand → its module and its help. The module has ``SETTINGS``
            (dataclasses), ``run``, which takes an instance of each, and perhaps ``DESCRIPTION``.
        argv: The command line; None: that of the process.

    Returns:
        What the subcommand's ``run`` returns: the exit status.
    """
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] in commands:
        module = importlib.import_module(commands[argv[0]][0])
        text = getattr(module, "DESCRIPTION", module.__doc__)
        parser = Parser(prog=f"{prog} {argv[0]}", description=text)
        return module.run(*parse(parser, argv[1:], *module.SETTINGS))
    parser = Parser(prog=prog, description=description)
    listed = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, (_, text) in commands.items():
        listed.add_parser(name, help=text)
    parser.parse_args(argv)
    return None
