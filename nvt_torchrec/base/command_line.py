"""Command lines from dataclasses: each field that :func:`flag` declares is an argument.

A declaration holds a setting's default, help, range and dependencies; the annotation of the field
gives its type. :class:`Settings` enforces the declarations, so settings that are made in Python are
checked like those of a command line.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import math
import re
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NoReturn, TypeVar

from nvt_torchrec.base.errors import SettingsError, adapt_commands
from nvt_torchrec.base.files.validation import parse_strict_json

T = TypeVar("T")
_LARGEST = sys.float_info.max


@dataclasses.dataclass(frozen=True)
class Rules:
    """The declaration of a field, without name, type and default; see :func:`flag`."""

    text: str
    minimum: float = -_LARGEST
    above: float = -math.inf
    maximum: float = _LARGEST
    choices: tuple[str, ...] = ()
    needs: str = ""
    excludes: tuple[str, ...] = ()
    group: str = ""
    metavar: str = ""
    parse: Callable[[str], Any] | None = None
    positional: bool = False
    aliases: tuple[str, ...] = ()

    def name(self, field: dataclasses.Field) -> str:
        """Return the field's name on a command line."""
        return field.name if self.positional else f"--{field.name}"

    def range(self, *, finite: bool = True) -> str:
        """Describe the allowed numbers, for the error about a number.

        Args:
            finite: Whether that number is finite.
        """
        bounds = []
        if not finite and self.maximum <= _LARGEST:
            bounds.append("finite")
        if self.minimum > -_LARGEST:
            bounds.append(f"at least {self.minimum}")
        if self.above > -math.inf:
            bounds.append(f"above {self.above}")
        if self.maximum < _LARGEST:
            bounds.append(f"at most {self.maximum}")
        return " and ".join(bounds)


class Parsed(Generic[T]):
    """The type of a field that holds a T, but also accepts text, for type checkers.

    At run time, ``Parsed[T]`` is T itself.
    """

    if TYPE_CHECKING:

        def __get__(self, instance: object, owner: Any) -> T: ...

        def __set__(self, instance: object, value: T | str) -> None: ...

    else:

        def __class_getitem__(cls, kind: Any) -> Any:
            return kind


def flag(text: str, default: Any = dataclasses.MISSING, **rules: Any) -> Any:
    """Declare a field of a dataclass that is also an argument of a command line.

    Args:
        text: The help. The default is appended, unless the text mentions it.
        default: The default, or a function that returns it. Without one the argument is required.
        rules: The other fields of :class:`Rules`. ``minimum``, ``above``, ``maximum``: bounds of a
            number, or of each number of a tuple (``maximum=math.inf`` allows infinity, too).
            ``choices``: the allowed values. ``needs``: the flag, or flag and value, without which
            this one has no effect (``--mode train``), or several, joined by ``or``. ``excludes``:
            the names of the fields that must not be set together with this one. ``group``: the
            heading in the help. ``metavar``: the name of the value in the help. ``parse``: converts
            the text, if the type of the field is not enough. ``positional``: whether the argument
            is recognized by its position. ``aliases``: the names that other programs have for the
            flag, without dashes, or for the flag with one value (``"NAME VALUE"``); they are
            refused with a hint at the name here.

    Returns:
        The field, which has the type Any for type checkers.
    """
    given = {"default_factory" if callable(default) else "default": default}
    return dataclasses.field(**given, metadata={"rules": Rules(text, **rules)})


class Settings:
    """Base of dataclasses that check themselves against the declarations of their fields.

    Attributes:
        OTHER_PROGRAMS: The page that lists the flags of other programs; errors about them name it.
        LEFT_OUT: Flags of other programs that are on the page and have no counterpart here.

    Raises:
        SettingsError: A value is not allowed, or has no effect with the other values.
    """

    OTHER_PROGRAMS: ClassVar[str] = ""
    LEFT_OUT: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self) -> None:
        fields = _list_declared(type(self))
        for field, rules in fields:
            value = _read(getattr(self, field.name), field, rules)
            object.__setattr__(self, field.name, value)
            if value is not None and not isinstance(value, dict):
                _check_value(f"{rules.name(field)} {format_value(value)}", value, rules)
        given: dict[str, str] = {}  # the flags whose values are not the defaults, by name
        for field, rules in fields:
            value = getattr(self, field.name)
            if value == field.default:
                continue
            given[field.name] = rules.name(field)
            if value is not True:
                given[field.name] += f" {format_value(value)}"
        for field, rules in fields:
            if field.name not in given:
                continue
            for other in given.keys() & set(rules.excludes):
                raise SettingsError(
                    f"--{field.name} and --{other} are both set", "give only one of them"
                )
            if rules.needs and not self._has_effect(rules.needs, given):
                raise SettingsError(
                    f"{given[field.name]} has no effect without {rules.needs}",
                    f"add {rules.needs}, or remove --{field.name}",
                )

    def _has_effect(self, needs: str, given: Mapping[str, str]) -> bool:
        """Return whether one of the flags in ``needs`` is given, with the value if it names one."""
        for alternative in re.split(" or |--", needs):
            if not alternative:
                continue
            name, *value = alternative.split()
            if value and str(getattr(self, name)) == value[0]:
                return True
            if not value and name in given:
                return True
        return False


def _read(value: Any, field: dataclasses.Field, rules: Rules) -> Any:
    """Convert a value that is given as text or as a path to the type of its field."""
    if not isinstance(value, str | Path):
        return value
    if value == "" and field.default != "":  # an unset variable in a shell gives an empty argument
        raise SettingsError(f"{rules.name(field)} is empty", "give a value, or remove the flag")
    if rules.parse is not None:
        return rules.parse(str(value))
    # annotations are strings: of "Path | None" and "Parsed[Path]", only "Path" is needed
    kind = re.split(r"[] ]", str(field.type).removeprefix("Parsed["))[0]
    if kind == "Path":
        return Path(value)
    return str(value) if kind == "str" else value


def _check_value(given: str, value: Any, rules: Rules) -> None:
    """Check a value, or a tuple of values, against its declaration.

    Args:
        given: The flag with the value, for errors.
        value: The value.
        rules: The declaration.

    Raises:
        SettingsError: The value is not allowed.
    """
    is_tuple = isinstance(value, tuple)
    values = value if is_tuple else (value,)
    if rules.choices and not set(values) <= set(rules.choices):
        how_many = "some" if is_tuple else "one"
        raise SettingsError(given, f"{how_many} of {', '.join(rules.choices)}")
    numbers = [v for v in values if isinstance(v, (int, float)) and not isinstance(v, bool)]
    fit = all(v > rules.above and rules.minimum <= v <= rules.maximum for v in numbers)
    has_none = value == () and rules.minimum > -_LARGEST
    if not fit or has_none:
        allowed = rules.range(finite=all(math.isfinite(number) for number in numbers))
        subject = "each number" if is_tuple else "it"
        raise SettingsError(given, f"{subject} must be {allowed}")


def format_value(value: Any) -> Any:
    """Format a value as it is written after its flag."""
    if isinstance(value, frozenset):
        value = tuple(sorted(value))
    return ",".join(map(str, value)) if isinstance(value, tuple) else value


def _list_declared(settings_class: type) -> list[tuple[dataclasses.Field, Rules]]:
    """Return the fields that :func:`flag` declared, with their declarations."""
    fields = dataclasses.fields(settings_class)
    return [(field, field.metadata["rules"]) for field in fields if "rules" in field.metadata]


class Parser(argparse.ArgumentParser):
    """A parser whose errors are :class:`SettingsError`, and that leaves defaults to dataclasses."""

    def __init__(self, **options: Any) -> None:
        options |= {
            key: adapt_commands(text) for key, text in options.items() if isinstance(text, str)
        }
        # an abbreviation could mean another flag in a later version
        super().__init__(argument_default=argparse.SUPPRESS, allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        """Raise the message as :class:`SettingsError`."""
        raise SettingsError(message, f"see: {self.prog} --help")

    def flags(self) -> set[str]:
        """Return all flags but ``--help``."""
        names = {name for action in self._actions for name in action.option_strings}
        return {name for name in names if name.startswith("--")} - {"--help"}


def parse_integers(text: str) -> tuple[int, ...]:
    """Parse ``"512,256"`` into (512, 256)."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a comma-separated list of integers"
        ) from None


def parse_words(text: str) -> tuple[str, ...]:
    """Parse ``"a,b"`` into ("a", "b")."""
    parts = [part.strip() for part in text.split(",")]
    return tuple(part for part in parts if part)


def parse_key_value(text: str) -> tuple[str, Any]:
    """Parse ``"layers=[64,32]"`` into ("layers", [64, 32]); other values than JSON are text."""
    key, equals, value = text.partition("=")
    if not key.isidentifier() or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    try:
        return key, parse_strict_json(value)
    except ValueError:
        return key, value


def _path(text: str) -> Path | str:
    """Parse ``"a/b"`` into Path("a/b").

    An empty text, which would become Path("."), stays text, so that the dataclass refuses it.
    """
    return Path(text) if text else ""


class _Collect(argparse.Action):
    """Collects the pairs that follow a flag in a dict."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
        setattr(namespace, self.dest, dict(values))


#: Type of a field → the function that parses it, and the name of the value in the help.
_TYPES: dict[Any, tuple[Callable[[str], Any], str]] = {
    int: (int, "N"),
    float: (float, "X"),
    str: (str, "TEXT"),
    Path: (_path, "PATH"),
    tuple[int, ...]: (parse_integers, "N,N,…"),
    tuple[str, ...]: (parse_words, "A,B,…"),
    Mapping[str, Any]: (parse_key_value, "KEY=VALUE"),
}


def add_arguments(parser: Parser, *settings_classes: type) -> None:
    """Add an argument for each declared field of the dataclasses."""
    groups: dict[str, Any] = {"": parser}
    for settings_class in settings_classes:
        hints = typing.get_type_hints(settings_class)
        for field, rules in _list_declared(settings_class):
            if rules.group not in groups:
                groups[rules.group] = parser.add_argument_group(rules.group)
            _add(groups[rules.group], field, rules, hints[field.name])


def _add(group: Any, field: dataclasses.Field, rules: Rules, hint: Any) -> None:
    """Add the argument of a field to a group of the parser."""
    if isinstance(hint, types.UnionType):  # X | None
        hint = next(kind for kind in typing.get_args(hint) if kind is not types.NoneType)
    is_computed = field.default_factory is not dataclasses.MISSING
    default = None if is_computed or hint not in _TYPES else field.default
    text = rules.text
    if default not in (dataclasses.MISSING, None, "", ()) and "default" not in text:
        text += f" (default: {format_value(default)})"
    text = adapt_commands(text).replace("%", "%%")
    if hint is bool:  # --no-NAME exists only if the default is not False
        action = "store_true" if field.default is False else argparse.BooleanOptionalAction
        group.add_argument(f"--{field.name}", action=action, help=text)
        return
    parse, metavar = _TYPES.get(hint, (rules.parse, "TEXT"))
    options: dict[str, Any] = {"help": text, "type": rules.parse or parse}
    if hint == Mapping[str, Any]:
        options |= {"nargs": "+", "action": _Collect}
    if rules.choices and hint is str:  # shown only; the dataclass refuses other values
        options["metavar"] = f"{{{','.join(rules.choices)}}}"
    else:
        options["metavar"] = rules.metavar or metavar
    required = default is field.default_factory is dataclasses.MISSING
    if rules.positional:
        optional = {} if required else {"nargs": "?", "default": default}
        group.add_argument(field.name, **optional, **options)
    else:
        group.add_argument(f"--{field.name}", required=required, **options)


def parse(
    parser: Parser, argv: Sequence[str] | None, *settings_classes: type[Settings]
) -> list[Any]:
    """Parse a command line into one instance of each dataclass.

    Args:
        parser: A parser without arguments, or with arguments that belong to no dataclass.
        argv: The command line; None for that of the process.
        settings_classes: Dataclasses whose declared fields are the arguments.

    Raises:
        SettingsError: An argument is unknown (the error suggests another one), missing, or has a
            value that is not allowed.
    """
    add_arguments(parser, *settings_classes)
    argv = sys.argv[1:] if argv is None else argv
    # Unknown flags are refused before parsing, because argparse would take their values for
    # positional arguments, and the error would be about these.
    names = [text.split("=")[0] for text in argv if re.match("-+[A-Za-z]", text)]
    known = parser.flags() | {"-h", "--help"}
    foreign = _foreign_flags(settings_classes)
    _refuse({name: _suggest_flag(name, parser, foreign) for name in names if name not in known})
    args, unexpected = parser.parse_known_args(argv)
    _refuse(dict.fromkeys(unexpected, f"see: {parser.prog} --help"))
    parsed = []
    for settings_class in settings_classes:
        given = {}
        for field, _ in _list_declared(settings_class):
            if hasattr(args, field.name):  # otherwise the dataclass sets the default
                given[field.name] = getattr(args, field.name)
        parsed.append(settings_class(**given))
    return parsed


def _refuse(unknown: Mapping[str, str]) -> None:
    """Raise an error if there are unknown arguments, which are mapped to their remedies."""
    if len(unknown) == 1:
        ((name, instead),) = unknown.items()
        raise SettingsError(f"unknown argument {name}", instead)
    if unknown:
        lines = [f"{name}: {instead}" for name, instead in unknown.items()]
        raise SettingsError(f"unknown arguments {', '.join(unknown)}", "\n  -> ".join(lines))


def _foreign_flags(settings_classes: Sequence[type[Settings]]) -> dict[str, str]:
    """Return the flags of other programs, mapped to the remedies for using them here."""
    instead = {}
    for settings_class in settings_classes:
        page = settings_class.OTHER_PROGRAMS
        for flag_name in settings_class.LEFT_OUT:
            instead[flag_name] = f"it does not exist here; {page} says why, or what to use"
        for field, rules in _list_declared(settings_class):
            for alias in rules.aliases:
                theirs, _, value = alias.partition(" ")
                ours = f"{rules.name(field)} {value}".rstrip()
                instead[f"--{theirs}"] = f"it is called {ours} here ({page})"
    return instead


def _suggest_flag(name: str, parser: Parser, foreign: Mapping[str, str]) -> str:
    """Return the remedy for an unknown flag.

    Args:
        name: The unknown flag, as it was given.
        parser: The parser with all flags of this program.
        foreign: The flags of other programs, mapped to their remedies.
    """
    # parsers of other programs accept flags with one dash, and --noX for a switch X
    flag = f"--{name.lstrip('-')}"
    switch = flag.replace("--no", "--", 1)
    if flag in foreign:
        return foreign[flag]
    if flag in parser.flags():
        return f"it takes two dashes: {flag}"
    if switch != flag and switch in parser.flags() | foreign.keys():
        return "remove it: a switch is off unless it is given"
    close = difflib.get_close_matches(flag, parser.flags(), n=1)
    return f"did you mean {close[0]}?" if close else f"see: {parser.prog} --help"
