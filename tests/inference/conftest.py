"""Two models, trained once for all tests: on Criteo's columns, and on every other raw type."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from nvt_torchrec.etl.run import EtlSettings, run
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.feature_spec.toml_file import load_spec
from nvt_torchrec.inference.model.bundle import write_bundle
from nvt_torchrec.inference.predictor import Predictor
from tests.inference.bundles import make_bundle
from tests.logs import CRITEO, write_log
from tests.spec_logs import write_spec_log
from tests.training.runs import EXAMPLE, train_here, train_many

TRAINING = [*EXAMPLE, "--adagrad", "--learning_rate=0.1", "--batch_size=64", "--epochs=2"]


@dataclasses.dataclass
class Trained:
    """A log, its ETL and a model trained on it."""

    raw: Path
    days: list
    workflow: Path
    parquet: Path
    checkpoint: Path

    @property
    def flags(self) -> list[str]:
        return ["--workflow", str(self.workflow), "--checkpoint", str(self.checkpoint)]


def train_model(
    base: Path, spec: FeatureSpec, *flags: str, days: list | None = None, ranks: int = 1
) -> Trained:
    """Run the ETL on the log ``base / "raw"`` and train on its output; one rank is this process."""
    run(EtlSettings(str(base / "raw"), base / "out", spec, engine="cpu"))
    parquet, checkpoint = base / "out" / "criteo_binary" / "split", base / "checkpoint"
    paths = [f"--binary_path={parquet}", f"--save_checkpoint_path={checkpoint}"]
    command = [*paths, f"--log_path={base / 'log'}", *TRAINING, *flags]
    if ranks == 1:
        train_here(*command)
    else:
        train_many([command], ranks)
    return Trained(base / "raw", days or [], base / "out" / "workflow", parquet, checkpoint)


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Criteo's columns, one rank."""
    base = tmp_path_factory.mktemp("criteo")
    days = write_log(base / "raw", [400, 300, 201], seed=5)
    return train_model(base, CRITEO, days=days)


@pytest.fixture(scope="session")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """The retail spec: strings, integers, prices, lists, a shared vocabulary, a hash; two ranks."""
    base = tmp_path_factory.mktemp("shop")
    spec = load_spec("retail")
    write_spec_log(base / "raw", spec, rows=400)
    return train_model(base, spec, ranks=2)


@pytest.fixture(scope="session")
def predictor(trained: Trained) -> Predictor:
    return Predictor.load(trained.workflow, trained.checkpoint)


@pytest.fixture(scope="session")
def shop_predictor(shop: Trained) -> Predictor:
    return Predictor.load(shop.workflow, shop.checkpoint)


@pytest.fixture(scope="session")
def bundle(trained: Trained, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the model on Criteo's columns; made, and moved elsewhere."""
    path = tmp_path_factory.mktemp("bundle")
    write_bundle(trained.workflow, trained.checkpoint, path / "made")
    (path / "moved").mkdir()
    return (path / "made").rename(path / "moved" / "here")


@pytest.fixture(scope="session")
def small_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of weights that nobody trained."""
    return make_bundle(tmp_path_factory.mktemp("small") / "bundle", seed=1)
