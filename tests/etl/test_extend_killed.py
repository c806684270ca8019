from __future__ import annotations

from pathlib import Path

from tests.forks import seen_by


def test_killed_before_any_kind_of_write(tmp_path: Path) -> None:
    """The output is a whole generation or says that it is not; resumed, it is byte-identical."""
    seen = seen_by("tests.etl.killed_extend", tmp_path)
    assert seen["wrong"] == []
    assert {"generation 0", "switch", "generation 1"} <= seen["kills"].keys()
    assert seen["kills"]["switch"] > 4  # threads decide at how many writes it is under way
    assert seen["undone"] > 6
    assert {
        "open .work/#/events/_histories/recent/.#.tmp/*.npy",
        "os.rename .work/#/events/_histories/recent/*",
        "os.link .work/#/next/criteo_binary/split/#/*.parquet",
        "os.link .work/#/next/criteo_binary/split/_histories/recent/#/*.npy",
        "os.link .work/#/next/criteo_binary/split/_vectors/taste/#/*.npy",
        "os.link .work/#/next/workflow/vectors/taste/#/*.npy",
        "os.rename .work/#/next/workflow/events/*.npy",
        "os.rename *.json",
    } <= {*seen["kinds"]}
