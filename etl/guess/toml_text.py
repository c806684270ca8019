"""A guess as a TOML file with comments."""

from __future__ import annotations

import json
import textwrap
from typing import Any

from nvt_torchrec.etl.guess.roles import Feature, Guess, spec_name
from nvt_torchrec.etl.guess.sample import SampledFile

_WIDTH = 100


def to_toml(guess: Guess, sample: SampledFile, path: str) -> str:
    """Return a feature spec as text."""
    lines = _comment(_about(sample, path))
    lines += [f"# {note}" for note in sample.notes]
    keys = dict(sample.input)
    columns = _columns(guess, sample)
    if columns:
        keys.pop("header", None)
        keys["columns"] = columns
    if keys:
        lines += ["", "[input]", *_keys(keys)]
    mark = "[label]" if len(guess.labels) == 1 else "[[label]]"
    for rule, why in guess.labels:
        lines += ["", *_comment(why), mark, *_keys(_label(rule, sample, guess))]
    lines += ["", *_comment(guess.split_why), "[split]", *_keys(guess.split)]
    for group in _groups(guess.features):
        lines += ["", *_block(group)]
    if guess.unread:
        lines += ["", "# Not read:"]
        for name, reason in guess.unread.items():
            lines += _comment(f"{_shown(name)}: {reason}", "#   ")
    return "\n".join(lines) + "\n"


def _about(sample: SampledFile, path: str) -> str:
    name = path.rstrip("/").rsplit("/", 1)[-1]
    part = "all" if sample.whole else "some"
    text = (
        f"First spec for {_shown(name)}, made from {part} of its rows ({sample.rows:,}). Review "
        "it. Counts and shares are of these rows."
    )
    if sample.uneven:
        text += f" {sample.uneven} of them are malformed as lines, see --on_bad_rows."
    return text


def _shown(text: str) -> str:
    return "".join(character if character.isprintable() else "?" for character in text)[:80]


def _label(rule: dict[str, Any], sample: SampledFile, guess: Guess) -> dict[str, Any]:
    """Return the keys of a label, whose name a spec can have."""
    source = rule["name"]
    name = spec_name(source)
    keys = {**rule, "name": name}
    if name != source:
        keys["from"] = source
    if sample.columns[guess.names.index(source)].trim:
        keys["trim"] = True
    return keys


def _columns(guess: Guess, sample: SampledFile) -> list[str]:
    """Return ``columns`` of a text without a header; [] where the order of the spec says it."""
    if not sample.positional:
        return []
    read = [rule["name"] for rule, _ in guess.labels]
    read += [guess.split["column"]] if guess.split.get("column") else []
    read += [feature.source for feature in guess.features]
    read = list(dict.fromkeys(read))
    return [name if name in read else "" for name in guess.names] if read != guess.names else []


def _groups(features: list[Feature]) -> list[list[Feature]]:
    """Return the features, neighbours with the same keys together."""
    groups: list[list[Feature]] = []
    for feature in features:
        last = groups[-1][-1] if groups else None
        alone = feature.name != feature.source or "derive" in feature.options
        same = last and (last.kind, last.options) == (feature.kind, feature.options)
        if same and not alone and last and last.name == last.source:
            groups[-1].append(feature)
        else:
            groups.append([feature])
    return groups


def _block(group: list[Feature]) -> list[str]:
    first = group[0]
    options = dict(first.options)
    if first.name != first.source:
        options = {"from": first.source, **options}
    if len(group) == 1:
        return [
            *_comment(first.why),
            f"[[{first.kind}]]",
            *_keys({"names": [first.name], **options}),
        ]
    width = max(len(_value(feature.name)) for feature in group) + 1
    names = [f"    {_value(feature.name) + ',':{width}} # {feature.why}" for feature in group]
    return [f"[[{first.kind}]]", "names = [", *names, "]", *_keys(options)]


def _comment(text: str, mark: str = "# ") -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=mark,
        subsequent_indent=mark,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _keys(options: dict[str, Any]) -> list[str]:
    lines = []
    for key, value in options.items():
        text = f"{key} = {_value(value)}"
        if isinstance(value, list) and len(text) > _WIDTH:
            lines += [f"{key} = [", *(f"    {_value(item)}," for item in value), "]"]
        else:
            lines.append(text)
    return lines


def _value(value: Any) -> str:
    """Return a value as TOML writes it; strings as in JSON, whose escapes TOML has too."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)
