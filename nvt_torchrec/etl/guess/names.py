"""What the names of columns say of them."""

from __future__ import annotations

import re

_PERSON = "customer|client|member|user"
_THINGS = (
    "account|kind|group|zip|post|pos|position|version|user|item|movie|book|product|brand|device|"
    "site|app|customer|client|member|visitor|session|campaign|advertiser|creative|channel|city|"
    "region|country|continent|market|state|gender|sex|occupation|industry|genre|author|publisher|"
    "query|keyword|segment|cluster|sku|shop|store|seller|merchant|order|video|song|artist|page|"
    "domain|language|browser|os|carrier|worker|name"
)
#: What a whole name means, regardless of case. Events are what people do with what they are shown,
#: never known when it is shown; outcomes are measured afterwards, unlike prev_conversions; a name
#: of "perhaps" may be a feature as well.
_NAMES = {
    "label": r"labels?|targets?|y",
    "event": r"((is|has|was|did)_?|label_)?(clicks?|clicked|clk|conversions?|convert(ed)?|buys?|"
    r"purchased?|bought|ordered|cart|add_?to_?cart|fav(ou?rited?)?|(dis)?liked?s?|follow(ed)?|"
    r"forward(ed)?|comment(ed)?|shared?|hate|subscri(ption|bed?)|install(ed|s)?|deposit|"
    r"churn(ed)?|fraud|attribut(ion|ed)|booking|booked|survived|responded|profile_enter|"
    r"(long|valid|effective)_view|visit(ed)?|retention|retained|exited)(_?(bool|flag|label))?",
    "perhaps": r"(is_?)?(class|outcome|response|income|default(.payment.*)?|action|behaviou?r|"
    r"status|state)",
    "outcome": r"(play(ing)?|watch(ing)?|dwell|stay|read(ing)?|comment_stay|profile_stay)_?"
    r"(times?(_ms)?|duration|ratio|percentage|seconds|ms)|impressions?|ratings?|overall|"
    r"(?!.*(hist|prev|past|last|avg|rate)).*conversions?([\W_]?(value|amount|count))?",
    "rating": r"(.*[\W_])?(ratings?|stars|score|grade|overall)",
    "weight": r"((sample|instance|row|case|importance|example)[_ ]?)?weights?|fnlwgt|"
    r"(.*_)?propensity(_score)?",
    "time": r"(?!.*[\W_]id$)(.*(time|date|day|hour|stamp|birth|dob).*|(.*_)?(ts|at|on|when))",
    # dates that belong to a person, not to an event
    "birth": r".*(birth|dob|sign.?up|regist|enrol|joined|join.?date|"
    rf"({_PERSON}).?since|(dt|date).?({_PERSON})|({_PERSON}|account).?(date|created)).*",
    "user": rf"({_PERSON}|uid|visitor|viewer|household|session)[\W_]?(id|key|hash|code|no)?",
    # the last word, or the last two, of the name of integers that stand for things
    "thing": rf"({_THINGS})(id|no|nr|number)?|ids?|ip|code|type|category|categorical|cat|class|"
    "level|hash|key",
    "anonymous": r"C?\d+|feat(ure)?_?\d+",
}
_PATTERNS = {kind: re.compile(pattern, re.IGNORECASE) for kind, pattern in _NAMES.items()}
#: What stands behind the name of an event on another day (retention_7, clicked_30d), and what
#: behind that of a label where a column is known only with it.
DAY = re.compile(r"_?d?\d+(_?d(ays?)?)?$", re.IGNORECASE)
OF_EVENT = r"_?(id|timestamp|time|ts|at|date|pos|nb|amount|value|delay)(_?ms)?"


def is_called(name: str, *kinds: str) -> bool:
    """Return whether a name means one of some kinds of columns."""
    return any(_PATTERNS[kind].fullmatch(name) for kind in kinds)


def words_of(name: str) -> list[str]:
    """Return the words of a name such as ``movie_id`` or ``MovieID`` in lower case."""
    return [word.lower() for word in re.findall("[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]


def is_code(name: str) -> bool:
    """Return whether integers of this name stand for things."""
    words = words_of(name)
    last = (*words[-1:], "".join(words[-2:]))
    return any(is_called(each, "thing") for each in last) or is_called(name, "anonymous")
