"""Find what columns are by their names."""

from __future__ import annotations

import re

from nvt_torchrec.formats.splits import SPLITS

_PERSON = "customer|client|member|user"
_THINGS = (
    "account|kind|group|zip|post|pos|position|version|user|item|movie|book|product|brand|device|"
    "site|app|customer|client|member|visitor|session|campaign|advertiser|creative|channel|city|"
    "region|country|continent|market|state|gender|sex|occupation|industry|genre|author|publisher|"
    "query|keyword|segment|cluster|sku|shop|store|seller|merchant|order|video|song|artist|page|"
    "domain|language|browser|os|carrier|worker|name|agent|agency|company|vendor|supplier|partner|"
    "driver|host|branch|airline|airport|hotel|doctor|school"
)
#: Kind of column → pattern of a whole name, regardless of case. An event is what a person does with
#: an item, unknown when the item is shown; an outcome is measured afterwards, unlike
#: prev_conversions; a column of kind "perhaps" may be a label or a feature.
_NAMES = {
    "label": r"labels?|targets?|y",
    "event": r"((is|has|was|did)_?|label_)?(clicks?|clicked|clk|conversions?|convert(ed)?|buys?|"
    r"purchased?|bought|ordered|cart|add_?to_?cart|fav(ou?rited?)?|(dis)?liked?s?|follow(ed)?|"
    r"forward(ed)?|comment(ed)?|shared?|hate|subscri(ption|bed?)|install(ed|s)?|deposit|"
    r"churn(ed)?|fraud|attribut(ion|ed)|booking|booked|survived|responded|profile_enter|"
    r"cancel(l?ed|l?ation)?|refund(ed)?|attrition|readmitted|recommended|returned|((arr(ival)?|dep(arture)?)_?)?delayed|"
    r"(long|valid|effective)_view|visit(ed)?|retention|retained|exited)(_?(bool|flag|label))?",
    "perhaps": r"(is_?)?(class|outcome|response|income|default(.payment.*)?|action|behaviou?r|"
    r"status|state|risk|result)",
    "outcome": r"(play(ing)?|watch(ing)?|dwell|stay|read(ing)?|comment_stay|profile_stay)_?"
    r"(times?(_ms)?|duration|ratio|percentage|seconds|ms)|impressions?|ratings?|overall|"
    r"(?!.*(hist|prev|past|last|avg|rate)).*conversions?([\W_]?(value|amount|count))?",
    "rating": r"(.*[\W_])?(ratings?|stars?|score|grade|overall|feedback|satisfaction|preference|"
    r"opinion|vote)",
    # how long something took, which may reveal the label; the length of a film does not
    "duration": r"(.*[\W_])?(duration|elapsed|time_?spent)([\W_]?(time|s|sec|seconds|ms|min))?",
    "weight": r"((sample|instance|row|case|importance|example)[_ ]?)?weights?|fnlwgt|"
    r"(.*_)?propensity(_score)?",
    "time": r"(?!.*[\W_]id$)(.*(time|date|day|hour|stamp|birth|dob).*|(.*_)?(ts|at|on|when))",
    # dates that belong to a person, not to an event
    "birth": r".*(birth|dob|sign.?up|regist|enrol|joined|join.?date|"
    rf"({_PERSON}).?since|(dt|date).?({_PERSON})|({_PERSON}|account).?(date|created)).*",
    "user": rf"({_PERSON}|u|uid|visitor|viewer|household|session)[\W_]?(id|idx|key|hash|code|no)?",
    # the last word, or the last two, of the name of integers that stand for things
    "thing": rf"({_THINGS})(id|no|nr|number)?|[ac-jl-z]?(ids?|idx)|ip|code|type|category|"
    "categorical|cat|class|level|hash|key",
    "anonymous": r"C?\d+|feat(ure)?_?\d+",
    # the first word of the name of a quantity, whatever the last one is: years_at_company
    "quantity": "years|months|days|hours|minutes|num|total|avg|average|mean|max|min",
    # words for things that happened before the row
    "before": "hist(ory|oric|orical)?|prev(ious|iously)?|past|last|prior|before|recent|ever|avg|"
    "average|mean|rate|ctr|since|counts?|num|number|n|no",
    # words that many names end with, whatever the columns mean
    "general": "labels?|targets?|class|status|state|type|group|category|level|result|score|code|"
    "flag|y|outcome|response",
    # values that name the kind of event of a row, in a log of events of all kinds
    "kind of event": "(page_?)?views?|pv|expos(ure|ed)|impressions?|shown?|add_?to_?cart|"
    "remove_?from_?cart|wish_?list|transactions?|checkout|detail",
    # names of files and directories, and values, that say which split rows belong to
    "train": "train(ing)?",
    "valid": "valid(ation)?|val|dev",
    "test": "test(ing)?",
}
_PATTERNS = {kind: re.compile(pattern, re.IGNORECASE) for kind, pattern in _NAMES.items()}
#: The end of the name of an event on a later day (retention_7, clicked_30d).
DAY = re.compile(r"_?d?\d+(_?d(ays?)?)?$", re.IGNORECASE)
#: Minimum number of letters of a stem.
_MIN_STEM = 3
#: Endings to remove from a word for its stem: delayed, delays and delay have the same stem.
_ENDING = re.compile(r"(ations?|ions?|ing|ed|es|s|e)$")


def is_called(name: str, *kinds: str) -> bool:
    """Return True if a name matches one of the given kinds of ``_NAMES``."""
    return any(_PATTERNS[kind].fullmatch(name) for kind in kinds)


def split_words(name: str) -> list[str]:
    """Return the words of a name such as ``movie_id`` or ``MovieID`` in lower case."""
    return [word.lower() for word in re.findall("[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]


def is_code(name: str) -> bool:
    """Return True if integers in a column of this name are codes for things, not quantities."""
    words = split_words(name)
    if words and is_called(words[0], "quantity"):
        return False
    endings = [*words[-1:], "".join(words[-2:])]
    return any(is_called(ending, "thing") for ending in endings) or is_called(name, "anonymous")


def contains_outcome(name: str, outcome: str) -> bool:
    """Return True if a name says that a column is known only with an outcome, such as a label.

    The name begins with the outcome's name, as reservation_status_date does, or it contains the
    last word of the outcome's name, if that is an event, as ArrDelay and IsDepDelayed do. Names of
    what happened before a row, such as previous_cancellations, are excluded.
    """
    words = split_words(name)
    outcome_words = split_words(outcome)
    if any(is_called(word, "before") for word in words) or is_called(outcome, "general"):
        return False
    stems = list(map(_stem, words))
    outcome_stems = list(map(_stem, outcome_words))
    if not outcome_stems or sum(map(len, outcome_stems)) < _MIN_STEM:
        return False
    if len(stems) > len(outcome_stems) and stems[: len(outcome_stems)] == outcome_stems:
        return True
    last_word = outcome_words[-1]
    is_event = is_called(last_word, "event") or last_word.endswith("ed")
    return is_event and words != outcome_words and outcome_stems[-1] in stems


def _stem(word: str) -> str:
    """Return the stem of a word, without its ending."""
    stem = _ENDING.sub("", word) if len(word) > _MIN_STEM + 1 else word
    return re.sub(r"(.)\1$", r"\1", stem)  # cancelled like canceled


def find_split_name(text: str) -> str:
    """Return the split that a value names: train, valid or test; "" if it names none."""
    for split in SPLITS:
        if is_called(text.strip(), split):
            return split
    return ""


def find_split_path(path: str) -> str:
    """Return the split that the words of a path name, the last word first; "" if none."""
    for word in reversed(re.split(r"[^A-Za-z]+", path)):
        split = find_split_name(word)
        if split:
            return split
    return ""
