"""The ETL from Python: the script of docs/etl.md, settings as text, runs that are interrupted."""

from __future__ import annotations

import _thread
import logging
import re
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nvt_torchrec import EtlSettings, run
from nvt_torchrec.base.errors import SettingsError
from tests.etl.runs import settings, tree
from tests.logs import ROWS, write_log
from tests.shell import ROOT
from tests.shell import run as run_script

PRESETS = ROOT / "nvt_torchrec" / "formats" / "feature_spec" / "presets"
_BLOCK = re.compile(r"^## From Python\n\n```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


#: What a kernel of Jupyter has set up before it runs a cell.
_IN_A_KERNEL = """
from IPython.core.interactiveshell import InteractiveShell
InteractiveShell.instance().config.IPKernelApp.connection_file = "kernel.json"
"""


@pytest.mark.parametrize("notebook", [False, True])
def test_the_script_of_the_docs(tmp_path: Path, notebook: bool) -> None:
    write_log(tmp_path / "RAW", ROWS)
    shutil.copy(PRESETS / "criteo_1tb.toml", tmp_path / "spec.toml")
    [script] = _BLOCK.findall((ROOT / "docs" / "etl.md").read_text(encoding="utf-8"))
    # Otherwise it is imported, which alone shows no bar in a log.
    script = f"{_IN_A_KERNEL if notebook else 'import ipykernel'}\n{script}"
    (tmp_path / "script.py").write_text(script)
    status, printed = run_script(tmp_path, "python script.py")
    assert status == 0, printed
    assert "engine cpu: " in printed
    assert "'in': 151, 'out': 151" in printed
    assert ("rows/s" in printed) == notebook
    expected = settings(tmp_path / "RAW", tmp_path / "expected")
    run(expected)
    assert tree(tmp_path / "OUT").keys() == tree(tmp_path / "expected").keys()


def test_settings_as_text(tmp_path: Path) -> None:
    given = EtlSettings(tmp_path / "raw", str(tmp_path / "out"), "retail", days="0-2,5")
    assert (given.input_path, given.output_path) == (f"{tmp_path}/raw", tmp_path / "out")
    assert given.spec == EtlSettings("raw", "out", PRESETS / "retail.toml").spec
    assert given.days == {0, 1, 2, 5}
    with pytest.raises(SettingsError, match="days 'x': cannot read 'x'"):
        EtlSettings("raw", "out", days="x")


class Interrupt(logging.Handler):
    """Presses Ctrl-C once, soon after a message begins so.

    Not at once: a pool does not know a thread yet that logs while it is started.
    """

    def __init__(self, message: str) -> None:
        super().__init__(logging.DEBUG)
        self.message = message
        self.timer = threading.Timer(0.005, _thread.interrupt_main)

    def emit(self, record: logging.LogRecord) -> None:
        if self.message and record.getMessage().startswith(self.message):
            self.message = ""
            self.timer.start()


@pytest.fixture
def sigint() -> Iterator[None]:
    """Let Ctrl-C raise: a shell's background job, and what it starts, ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_run_goes_on_after_ctrl_c_in_the_same_process(tmp_path: Path, caplog, sigint) -> None:
    write_log(tmp_path / "raw", ROWS)
    given = settings(tmp_path / "raw", tmp_path / "out")
    run(given)
    expected = tree(given.output_path)
    shutil.rmtree(given.output_path)
    caplog.set_level(logging.DEBUG, "nvt_torchrec")
    logger = logging.getLogger("nvt_torchrec.etl")
    interrupted = 0
    for moment in ("begin fit", "fit:", "begin train", "describe:"):
        handler = Interrupt(moment)
        logger.addHandler(handler)
        try:
            run(given)
            if not handler.message:  # what was done before is not begun again
                handler.timer.join()
                time.sleep(0.1)  # it may come now
        except KeyboardInterrupt:
            interrupted += 1
        finally:
            logger.removeHandler(handler)
        if (given.output_path / "manifest.json").exists():
            shutil.rmtree(given.output_path)
    assert interrupted >= 2, "Python ignores one in a destructor"
    run(given)
    assert tree(given.output_path) == expected
