"""What ``python -m etl guess`` makes of logs as they are published, and that its specs run."""

from __future__ import annotations

import dataclasses
import random
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.etl.__main__ import main
from nvt_torchrec.etl.commands.guess import guess
from tests.etl.runs import etl_run
from tests.etl.test_guess import guessed, guessed_with_text

ROWS = 300


@dataclasses.dataclass(frozen=True)
class Sample:
    """A log and what its spec must say.

    Attributes:
        columns: Its columns, each with its values: ``1..9`` integers, ``a|b`` one of them, ``.3f``
            numbers below 1 in this format, ``bit``, or a name of ``VALUES``.
        labels: The labels, the main one first.
        dense: The dense columns.
        raw: The raw types of categorical columns, "lists of" before those with lists.
        comments: What the spec says in comments.
        delimiter: Between the fields.
        split: By what rows are split.
        header: Whether the names of the columns are in the file.
    """

    columns: str
    labels: str
    dense: str = ""
    raw: str = ""
    comments: tuple[str, ...] = ()
    delimiter: str = ","
    split: str = "share"
    header: bool = True

    def write(self, path: Path, rows: int = ROWS) -> Path:
        rng = random.Random(0)
        columns = [column.rpartition("=") for column in self.columns.split("; ")]
        lines = [self.delimiter.join(name for name, _, _ in columns)] if self.header else []
        for i in range(rows):
            fields = (_field(values, rng, i) for _, _, values in columns)
            lines.append(self.delimiter.join(map(str, fields)))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"{line}\n" for line in lines))
        return path


def _field(values: str, rng: random.Random, i: int) -> object:
    if values in VALUES:
        return VALUES[values](rng, i)
    if ".." in values:
        return rng.randint(*map(int, values.split("..")))
    if values.startswith("."):
        return f"{rng.random():{values}}"
    return rng.choice(values.split("|"))


def bit(rng: random.Random) -> int:
    return int(rng.random() < 0.3)


#: Values that depend on each other, or on the number of the row.
VALUES: dict[str, Callable[[random.Random, int], object]] = {
    "bit": lambda rng, i: bit(rng),
    "rare": lambda rng, i: bit(rng) * bit(rng),
    "number": lambda rng, i: i,
    "float": lambda rng, i: float(rng.randint(1, 5)),
    "ten": lambda rng, i: "|".join(str(rng.randint(0, 30)) for _ in range(10)),
    "ended": lambda rng, i: f"{rng.randint(1, 9)}|{rng.randint(1, 9)}|",
    "time": lambda rng, i: f"2024-01-{1 + i % 28:02d} 10:11:12",
    "often one": lambda rng, i: ",".join(rng.choice("abc") for _ in range(1 + (i % 50 == 7))),
    "quoted": lambda rng, i: '"' + ",".join(rng.sample("abc", rng.randint(1, 3))) + '"',
    "brackets": lambda rng, i: f'"[{rng.randint(1, 9)}, {rng.randint(1, 9)}]"',
    "ids": lambda rng, i: " ".join(str(rng.randint(1, 40)) for _ in range(i % 4)),
    "names": lambda rng, i: " ".join(f"N{rng.randint(1, 99_999)}" for _ in range(i % 5)),
    "isbn": lambda rng, i: f'"{rng.randint(1, 90):010d}"',
    "remark": lambda rng, i: '"a, ""b"""' if i % 20 == 7 else f"text {i % 9}",
    "amount": lambda rng, i: int(rng.expovariate(0.003)),
    "score": lambda rng, i: min(max(int(rng.gauss(650, 97)), 350), 850),
    "due": lambda rng, i: int(rng.lognormvariate(11, 0.5)),
    "classes": lambda rng, i: ["good", "good", "fair", "bad", "good", "fair"][i % 6],
}
SAMPLES = {
    "Hotel Reservations": Sample(  # a flag with few ones, and two texts of which one negates
        "Booking_ID=number; required_car_parking_space=0|0|0|0|0|0|0|0|0|1; lead_time=0..443; "
        "room=a|b; booking_status=Canceled|Not_Canceled|Not_Canceled",
        "booking_status",
        "lead_time",
        "required_car_parking_space=int; room=string",
        ("are Canceled; also possible: required_car_parking_space, room",),
    ),
    "Kickstarter": Sample(
        "ID=number; currency=USD|GBP; state=failed|failed|successful|successful|suspended; "
        "goal=due; country=US|DE|FR",
        "state",
        "goal",
        "currency=string; country=string",
        ("3 values: successful, ", "also possible: currency"),
    ),
    "MovieLens with users, without a header": Sample(
        "=1..400; =F|M; =.2f; =1..900; =1|2|3|4|5|4|5",
        "label",
        "float_0",
        "cat_0=int; cat_1=string; cat_2=int",
        ("numbers from 1 to 5", "also possible: 2"),
        delimiter="::",
        header=False,
    ),
    "retention": Sample(  # other days, and a column without a name at the end
        "userid=1..90; rounds=amount; version=a|b; retention_1=bit; retention_7=rare; =0|1",
        "retention_1|retention_7",
        "rounds",
        "userid=int; version=string",
    ),
    "amounts are no ids": Sample(
        "visit=bit; conversion=rare; MntWines=amount; CreditScore=score; person_income=due; "
        'mortgage_due=due; price=5|7.5|1000; discount=$5|$7.5|"$1,000"; note=remark',
        "visit|conversion",
        "MntWines|CreditScore|person_income|mortgage_due|price",
        "note=string",
        ("discount: numbers with signs: write them without",),
    ),
    "bank marketing": Sample(
        "age=18..90; job=admin|services|retired; default=yes|no; housing=yes|no; "
        "balance=-900..9000; subscription=yes|no|no",
        "subscription",
        "age|balance",
        "job=string; default=string; housing=string",
        ("also possible: default, housing",),
    ),
    "clicks and conversions": Sample(
        "customer=1..80; categorical_2=0..9; age_level=0..6; feat_10=0..40; propensity=.4f; "
        "conversion_timestamp=-1|500; click=bit; conversion=rare",
        "click|conversion",
        raw="customer=int; categorical_2=int; age_level=int; feat_10=int",
        comments=("propensity: looks like the weight", "conversion_timestamp: known only with the"),
    ),
    "KuaiRec": Sample(
        "user_id=0..60; video_id=0..90; play_duration=0..90000; video_duration=5000..60000; "
        "watch_ratio=.4f",
        "watch_ratio",
        "video_duration",
        "user_id=int; video_id=int",
        ("choose the threshold", "play_duration: looks like a label"),
    ),
    "Ali-CCP": Sample(  # names that are numbers
        "click=bit; purchase=rare; 101=1..60; 121=1..90; 205=1..13; 206=1..110",
        "click|purchase",
        raw="101=int; 121=int; 205=int; 206=int",
    ),
    "padded lists, and lists with a separator at the end": Sample(
        "user=1..50; label=bit; clicked_items=ten; tags=ended; site=a|b|c",
        "label",
        raw="user=int; clicked_items=lists of int; tags=lists of int; site=string",
    ),
    "some rows with a field too many, and times with a space": Sample(
        "click=bit; at=time; site=often one", "click", raw="site=string", split="time"
    ),
    "spaces around tabs": Sample(
        "click=bit; site=a b|c d; price=.3f", "click", "price", "site=string", delimiter=" \t "
    ),
    "lists by commas in quotes": Sample(
        "click=bit; genres=quoted; history=brackets; price=.3f",
        "click",
        "price",
        "genres=lists of string; history=lists of int",
    ),
    "lists by spaces": Sample(
        "click=bit; words=red shoes|blue shoes|socks; ids=ids; history=names",
        "click",
        raw="words=string; ids=lists of int; history=lists of string",
        delimiter=";",
    ),
    "numbers behind texts, without a header": Sample(
        "=bit; =a|b|c; =.3f", "label", "float_0", "cat_0=string", header=False
    ),
    "KAG": Sample(  # a report of an advertiser
        "ad_id=number; campaign_id=900..940; age=30-34|35-39; interest=2..66; "
        "Impressions=90..90000; Clicks=0|0|0|1|2|9; Spent=.2f; Total_Conversion=0..5; "
        "Approved_Conversion=0..2",
        "Clicks",
        "interest|Spent",
        "campaign_id=int; age=string",
        (
            "Total_Conversion: looks like a label, or is known only",
            "Approved_Conversion: looks like a label, or is known only",
        ),
    ),
    "Book-Crossing": Sample(
        'User-ID=1..60; ISBN=isbn; Book-Rating="0"|"0"|"0"|"5"|"7"|"8"|"10"',
        "Book-Rating",
        raw="User-ID=int; ISBN=string",
        comments=("at least 8: choose the threshold",),
        delimiter=";",
    ),
    "several classes": Sample(
        "height=.3f; gear=manual|automatic; Class=classes",
        "Class",
        "height",
        "gear=string",
        ("3 values: bad, 16.7%, is 1", "choose good 50.0%, fair 33.3%"),
    ),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_samples(name: str, tmp_path: Path) -> None:
    sample = SAMPLES[name]
    path = sample.write(tmp_path / "raw" / "log.csv")
    spec, text = guessed_with_text(path)
    plain = (column for column in spec.categorical if not column.derive)
    raw = (f"{column.name}={'lists of ' * column.multi_hot}{column.raw}" for column in plain)
    assert list(spec.labels) == sample.labels.split("|")
    assert "; ".join(raw) == sample.raw
    assert "|".join(column.name for column in spec.dense) == sample.dense
    assert spec.split.by == sample.split
    for comment in sample.comments:
        assert comment in text
    flags = ["--on_bad_rows", "quarantine", "--max_bad_fraction", "0.03"]
    spec_file = path.parent / "spec.toml"
    assert etl_run(path, tmp_path / "out", "--spec", str(spec_file), *flags) == 0


def test_what_is_no_table_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    path.write_text("1,2,3\n1,2\n1\n1,2,3\n" * 5)
    with pytest.raises(
        BadInputError, match="delimiter ',', 50% of the lines have 3 fields"
    ) as error:
        guess(str(path))
    assert error.value.remedy


@pytest.mark.parametrize("form", ["file", "directory", "glob"])
def test_files_of_days_are_split_by_days(form: str, tmp_path: Path) -> None:
    for day in ("2024-10-30", "2024-10-31"):
        SAMPLES["bank marketing"].write(tmp_path / "raw" / f"clicks-{day}.csv")
    raw = tmp_path / "raw"
    given = {"file": raw / "clicks-2024-10-31.csv", "directory": raw, "glob": raw / "clicks-*"}
    spec, text = guessed_with_text(given[form])
    assert spec.split.by == "days"
    days = text.partition(": pass ")[2].partition(" as --input_path")[0]
    spec_file = given[form].parent / "spec.toml"
    assert etl_run(days, tmp_path / "out", "--spec", str(spec_file)) == 0


def test_parts_of_one_table_are_no_days(tmp_path: Path) -> None:
    for part in range(2):
        SAMPLES["bank marketing"].write(tmp_path / "raw" / f"part-0000{part}.csv")
    assert guessed(tmp_path / "raw").split.by == "share"


def test_a_cut_last_line_is_left_out_by_the_command(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, spec = tmp_path / "log.csv", tmp_path / "spec.toml"
    lines = [f"{i * i % 7 % 2},s{i % 5},{i * i % 97},5\n" for i in range(300)]
    path.write_text("".join(["click,site,visits,shop\n", *lines, "1,s3"]))
    assert main(["guess", str(path), "--output", str(spec)]) in (0, None)
    command = shlex.split(caplog.messages[-2].replace("OUT", str(tmp_path / "out")))
    assert re.match("not read, .*: shop\nthe label is click", caplog.messages[-1])
    assert command[:4] == ["python", "-m", "etl", "run"]
    assert command[-2:] == ["--on_bad_rows", "quarantine"]
    assert main(command[3:]) in (0, None)


def test_the_file_that_was_read_is_named(tmp_path: Path) -> None:
    for part in range(2):
        SAMPLES["bank marketing"].write(tmp_path / "raw" / f"part-0000{part}.csv")
    _, text = guessed_with_text(tmp_path / "raw")
    assert "for raw, made from some of the rows of part-00000.csv (300)" in text
    says = guess(str(tmp_path / "raw"))[2]  # the last line that the command prints
    assert says.startswith("the label is subscription: two values, ")
    assert says.endswith("; --label chooses another: default, housing")
    with pytest.raises(BadInputError, match=r"none\.csv: no such file or directory"):
        guess(str(tmp_path / "none.csv"))
