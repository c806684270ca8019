"""Keep what a release writes, small, for the tests of all later ones: tests/data/VERSION.tar.xz.

    python -m tests.keep_release

To be called when a release is tagged, and committed. It holds a log, and of this log an output of
the ETL, a checkpoint, a bundle, and the bundle's scores. What later releases open is in
CONTRIBUTING.md, "Versions".
"""

from __future__ import annotations

import subprocess
import tarfile
import tempfile
from pathlib import Path

from nvt_torchrec import __version__

ROOT = Path(__file__).parents[1]
DATA = ROOT / "tests" / "data"
ROWS = 400
#: What is kept, by the names in the commands.
KEPT = ("clicks.csv", "OUT", "CKPT", "BUNDLE", "scores.parquet")
_COMMANDS = """
nvt-etl guess clicks.csv --output spec.toml
nvt-etl run --spec spec.toml --input_path clicks.csv --output_path OUT --engine cpu
nvt-train --binary_path OUT/criteo_binary/split --save_checkpoint_path CKPT --log_path log \
    --epochs 1 --batch_size 128 --embedding_dim 4 --dense_arch_layer_sizes 8,4 \
    --over_arch_layer_sizes 8,1
nvt-infer bundle --workflow OUT/workflow --checkpoint CKPT --output BUNDLE
nvt-infer predict --bundle BUNDLE --input clicks.csv --output scores.parquet
"""


def main() -> None:
    """Run the commands in a temporary directory, and pack what they wrote."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lines = (ROOT / "examples" / "clicks.csv").read_text().splitlines(keepends=True)
        (folder / "clicks.csv").write_text("".join(lines[: ROWS + 1]))
        subprocess.run(["bash", "-ec", _COMMANDS], cwd=folder, check=True)
        DATA.mkdir(exist_ok=True)
        with tarfile.open(DATA / f"{__version__}.tar.xz", "w:xz") as packed:
            for kept in KEPT:
                packed.add(folder / kept, kept, filter=_drop_owner)


def _drop_owner(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Leave out who made it."""
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


if __name__ == "__main__":
    main()
