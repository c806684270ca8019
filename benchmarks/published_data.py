"""The data sets with published results: their files, their splits, and the published figures.

Nothing is downloaded: the user puts the files into a directory for each data set (docs/quality.md
says where they come from). Each data set is converted once to files that the ETL reads.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd

from benchmarks.frappe_rebuilt import rebuild_train
from nvt_torchrec.base.errors import BadInputError

#: The names of the three parts' files that the ETL reads.
PARTS = ("train", "valid", "test")
#: Part → its name in the names of libFM files.
_LIBFM_PARTS = {"train": "train", "valid": "validation", "test": "test"}
FRAPPE_COLUMNS = (
    *("user", "item", "daytime", "weekday", "isweekend"),
    *("homework", "cost", "weather", "country", "city"),
)
_TAG_COLUMNS = ("user_id", "item_id", "tag_id")
#: The seed with which KGCN's programs draw negative items, and then the split.
_KGCN_SEED = 555
_IDS_SPEC = """[input]
format = "csv"
[label]
name = "label"
[split]
by = "files"
train = "train.csv"
valid = "valid.csv"
test = "test.csv"
[[categorical]]
names = [{names}]
raw = "int"
"""


@dataclasses.dataclass(frozen=True)
class Published:
    """Published metrics on test.

    Attributes:
        system: The model.
        auroc: Its AUROC.
        log_loss: Its log loss, if published.
        source: The publication.
    """

    system: str
    auroc: float
    log_loss: float | None
    source: str


@dataclasses.dataclass(frozen=True)
class PublishedData:
    """A data set with published results.

    Attributes:
        title: Its name in the table, and its split.
        digests: File name → MD5 or SHA-256 of the published file. For files that are made from
            others (Frappe, tags), the file that ``write`` makes is compared.
        write: A function (user's directory, output directory) that writes the files which the ETL
            reads, and returns the path to pass to it.
        spec: The text of a spec, the name of a bundled one, or "" to let ``nvt-etl guess`` write
            it, as a newcomer would.
        guess: The flags of ``nvt-etl guess``.
        histories: True if rows have histories, which some models need.
        figures: The published figures.
    """

    title: str
    digests: dict[str, str]
    write: Callable[[Path, Path], Path]
    spec: str = ""
    guess: tuple[str, ...] = ()
    histories: bool = False
    figures: tuple[Published, ...] = ()

    def compare_digests(self, folder: Path, written: Path) -> list[str]:
        """Return a note for each file that differs from the published one.

        Args:
            folder: The user's directory.
            written: The directory that ``write`` has filled, with the files that the user's lacks.
        """
        notes = []
        for name, published in self.digests.items():
            path = folder / name
            if not path.exists():
                path = written / name
            algorithm = "md5" if len(published) == 32 else "sha256"
            if _compute_digest(path, algorithm) != published:
                notes.append(f"{name} is not the published file ({algorithm} {published})")
        return notes


def _compute_digest(path: Path, algorithm: str) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, algorithm).hexdigest()


def _find(folder: Path, *names: str) -> Path:
    """Return the first of these files that exists in a directory. Raises BadInputError."""
    for name in names:
        if (folder / name).exists():
            return folder / name
    raise BadInputError(
        f"{folder} has no {' or '.join(names)}", "docs/quality.md says where to get it"
    )


def _write_part(
    folder: Path, output: Path, part: str, columns: tuple[str, ...], libfm: str
) -> None:
    """Write a part in the form of the benchmark BARS, from BARS' file or from NFM's libFM file.

    Raises:
        BadInputError: The directory has neither file.
    """
    path = _find(folder, f"{part}.csv", f"{libfm}.{_LIBFM_PARTS[part]}.libfm")
    if path.suffix == ".csv":
        (output / path.name).write_bytes(path.read_bytes())
    else:
        _write_csv(_read_libfm(path, columns), output / f"{part}.csv")


def _read_libfm(path: Path, columns: tuple[str, ...]) -> pd.DataFrame:
    """Read lines with a label, -1 or 1, and an id for each column, such as ``1 42:1 1572:1``."""
    text = path.read_text(encoding="ascii").replace(":1", "")
    rows = np.array(text.split(), dtype=np.int64).reshape(-1, 1 + len(columns))
    rows[:, 0] = rows[:, 0] == 1
    return pd.DataFrame(rows, columns=["label", *columns])


def _write_csv(rows: pd.DataFrame, path: Path) -> None:
    """Write rows in the same bytes as BARS does."""
    rows.to_csv(path, index=False, lineterminator="\r\n")


def _write_frappe(folder: Path, output: Path) -> Path:
    """Write Frappe as BARS' frappe_x1; if train is missing, rebuild it from the original log."""
    for part in PARTS[1:]:
        _write_part(folder, output, part, FRAPPE_COLUMNS, "frappe")
    train = _find(folder, "train.csv", "frappe.train.libfm", "frappe.csv")
    if train.name != "frappe.csv":
        _write_part(folder, output, "train", FRAPPE_COLUMNS, "frappe")
        return output
    log = pd.read_csv(train, sep="\t", dtype=str, keep_default_na=False)
    known = pd.concat([pd.read_csv(output / f"{part}.csv") for part in PARTS[1:]])
    _write_csv(rebuild_train(log, known), output / "train.csv")
    return output


def _write_tags(folder: Path, output: Path) -> Path:
    for part in PARTS:
        _write_part(folder, output, part, _TAG_COLUMNS, "ml-tag")
    return output


def _write_census(folder: Path, output: Path) -> Path:
    for name in ("adult.data", "adult.test"):
        (output / name).write_bytes(_find(folder, name).read_bytes())
    return output


def _write_last_fm(folder: Path, output: Path) -> Path:
    """Draw negative items and the split as KGCN's programs do, with the same seed.

    A user has as many negative items as positive ones. Sets of small integers have the same order
    in every CPython, so that the same draws give the same rows.
    """
    index_by_item: dict[str, int] = {}
    names = _find(folder, "item_index2entity_id.txt").read_text(encoding="utf-8")
    for index, line in enumerate(names.splitlines()):
        index_by_item[line.split("\t")[0]] = index
    positives: dict[str, set[int]] = {}
    plays = _find(folder, "user_artists.dat").read_text(encoding="utf-8").splitlines()
    for line in plays[1:]:
        user, item, _ = line.split("\t")
        if item in index_by_item:
            positives.setdefault(user, set()).add(index_by_item[item])

    random = np.random.RandomState(_KGCN_SEED)
    items = set(index_by_item.values())
    rows = []
    for user_index, chosen in enumerate(positives.values()):
        negatives = random.choice(list(items - chosen), size=len(chosen), replace=False)
        rows += [(user_index, item, 1) for item in chosen]
        rows += [(user_index, item, 0) for item in negatives]

    random = np.random.RandomState(_KGCN_SEED)
    fifth = int(len(rows) * 0.2)
    valid = random.choice(list(range(len(rows))), size=fifth, replace=False)
    rest = set(range(len(rows))) - set(valid)
    test = random.choice(list(rest), size=fifth, replace=False)
    train = list(rest - set(test))
    table = pd.DataFrame(rows, columns=["user", "item", "label"])
    for part, indices in zip(PARTS, (train, valid, test), strict=True):
        table.iloc[indices].to_csv(output / f"{part}.csv", index=False)
    return output


def _write_ml_100k(folder: Path, output: Path) -> Path:
    """Join ratings, users and films, sorted by time; 4 and 5 stars are positive."""
    ratings = pd.read_csv(
        _find(folder, "u.data"), sep="\t", names=["user", "item", "rating", "timestamp"]
    )
    users = pd.read_csv(
        _find(folder, "u.user"), sep="|", names=["user", "age", "gender", "occupation", "zip"]
    )
    films = pd.read_csv(_find(folder, "u.item"), sep="|", header=None, encoding="latin-1")
    genres = []
    for indicators in films.iloc[:, 5:].to_numpy():  # a column of 0 and 1 for each genre
        genres.append("|".join(f"g{genre}" for genre in np.flatnonzero(indicators)))
    films = pd.DataFrame({"item": films[0], "genres": genres, "releaseDate": films[2]})
    log = ratings.merge(users, on="user").merge(films, on="item")
    _write_log(log, output / "log.csv")
    return output / "log.csv"


def _write_ml_latest_small(folder: Path, output: Path) -> Path:
    ratings = pd.read_csv(_find(folder, "ratings.csv"))
    films = pd.read_csv(_find(folder, "movies.csv"))[["movieId", "genres"]]
    _write_log(ratings.merge(films, on="movieId"), output / "log.csv")
    return output / "log.csv"


def _write_log(log: pd.DataFrame, path: Path) -> None:
    """Write a log sorted by time, with ratings of 4 and more as clicks."""
    log["clicked"] = (log.pop("rating") >= 4).astype(int)
    log.sort_values("timestamp", kind="stable").to_csv(path, index=False)


def _write_hotel(folder: Path, output: Path) -> Path:
    path = output / "hotel.csv"
    path.write_bytes(_find(folder, "Hotel Reservations.csv").read_bytes())
    return path


def _make_ids_spec(columns: tuple[str, ...]) -> str:
    """Return the text of a spec whose columns are ids."""
    return _IDS_SPEC.format(names=", ".join(f'"{name}"' for name in columns))


def _make_bars_figures(data: str, **figures: tuple[float, float]) -> tuple[Published, ...]:
    """Return figures of BARS from (AUROC, log loss) of each model."""
    source = f"BARS 5b5e61f, `ranking/ctr/*/*_{data}/results.csv`, best run"
    return tuple(Published(name, *values, source) for name, values in figures.items())


_KGCN = "KGCN, WWW 2019, table 4"
_RTDL = "rtdl-revisiting-models e3ed46c, mean of 15"
DATA: dict[str, PublishedData] = {
    "frappe": PublishedData(
        title="Frappe, BARS' frappe_x1",
        digests={
            "train.csv": "ba7306e6c4fc19dd2cd84f2f0596d158",
            "valid.csv": "88d51bf2173505436d3a8f78f2a59da8",
            "test.csv": "3470f6d32713dc5f7715f198ca7c612a",
        },
        write=_write_frappe,
        spec=_make_ids_spec(FRAPPE_COLUMNS),
        figures=_make_bars_figures(
            "frappe_x1",
            FinalMLP=(0.986072, 0.148415),
            DNN=(0.984909, 0.158224),
            DCNv2=(0.984478, 0.149149),
            DeepFM=(0.984243, 0.148174),
            DLRM=(0.983995, 0.144441),
            FM=(0.967108, 0.206515),
            LR=(0.935584, 0.307643),
        ),
    ),
    "tags": PublishedData(
        title="MovieLens tags, BARS' movielenslatest_x1",
        digests={
            "train.csv": "efc8bceeaa0e895d566470fc99f3f271",
            "valid.csv": "e1930223a5026e910ed5a48687de8af1",
            "test.csv": "54e8c6baff2e059fe067fb9b69e692d0",
        },
        write=_write_tags,
        spec=_make_ids_spec(_TAG_COLUMNS),
        figures=_make_bars_figures(
            "movielenslatest_x1",
            FinalMLP=(0.971968, 0.196645),
            DCNv2=(0.969098, 0.214736),
            DLRM=(0.969071, 0.214993),
            DeepFM=(0.968515, 0.213002),
            FM=(0.943435, 0.272893),
            LR=(0.934189, 0.320077),
        ),
    ),
    "adult": PublishedData(
        title="Adult, official test set",
        digests={
            "adult.data": "5b00264637dbfec36bdeaab5676b0b309ff9eb788d63554ca0a249491c86603d",
            "adult.test": "a2a9044bc167a35b2361efbabec64e89d69ce82d9790d2980119aac5fd7e9c05",
        },
        write=_write_census,
        spec="census",
        figures=(
            Published("CatBoost", 0.9276, None, _RTDL),
            Published("LightGBM, tuned", 0.9274, None, _RTDL),
            Published("FT-Transformer", 0.9135, None, _RTDL),
            Published("MLP", 0.9047, None, _RTDL),
        ),
    ),
    "last_fm": PublishedData(
        title="Last.FM, KGCN's split",
        digests={
            "user_artists.dat": "254272fa721c3935e8be286d28c051b206844307128698ab4eaa41d483379416",
            "item_index2entity_id.txt": (
                "f9693bdde538f755d09b9931b0be662a98965e538658a00c2050912c0adf487b"
            ),
        },
        write=_write_last_fm,
        spec=_make_ids_spec(("user", "item")),
        figures=(
            Published("KGCN, with a knowledge graph", 0.796, None, _KGCN),
            Published("LibFM", 0.777, None, _KGCN),
        ),
    ),
    "ml_100k": PublishedData(
        title="MovieLens 100K, by time, with what happened before",
        digests={
            "u.data": "06416e597f82b7342361e41163890c81036900f418ad91315590814211dca490",
            "u.user": "f120e114da2e8cf314fd28f99417c94ae9ddf1cb6db8ce0e4b5995d40e90e62c",
            "u.item": "553841ebc7de3a0fd0d6b62a204ea30c1e651aacfb2814c7a6584ac52f2c5701",
        },
        write=_write_ml_100k,
        guess=("--label", "clicked", "--events"),
        histories=True,
    ),
    "ml_latest_small": PublishedData(
        title="MovieLens latest-small, by time, with what happened before",
        digests={
            "ratings.csv": "aa289ca83157595d0df6aea1be6a4ded676ddc4385472e8313a8ed9805352646",
            "movies.csv": "44a0aa02aec20be2a197f2ecc7aaf99884ba84d3eb9e85aa2c376eb57d9896d7",
        },
        write=_write_ml_latest_small,
        guess=("--label", "clicked", "--events"),
        histories=True,
    ),
    "hotel": PublishedData(
        title="Hotel reservations, at random",
        digests={
            "Hotel Reservations.csv": (
                "d25e1d4680b2b91bcf5fd0a6b690f26c3bdfd52eb4e434e69018cb7bd60f6782"
            ),
        },
        write=_write_hotel,
        guess=("--label", "booking_status"),
    ),
}
