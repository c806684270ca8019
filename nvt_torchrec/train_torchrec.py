"""Train a sharded TorchRec DLRM on what ``python -m etl run`` wrote.

This is what ``train_torchrec.py`` runs and, installed, ``nvt-train``.
"""

from __future__ import annotations

import nvt_torchrec.base.interrupts  # before all that takes time: Ctrl-C is one line now

# isort: split
import gc
import json
import logging
import os
import sys
import time

from nvt_torchrec.base.errors import run_main

#: Seconds that a rank waits before it reports an error that another rank reports, too, so that the
#: launcher ends it meanwhile and the error is printed once. A connection is lost because another
#: rank failed; errors of input or settings mostly occur on all ranks, and rank 0 reports them.
_REPORT_DELAY_S = 2.0


def _train(argv: list[str]) -> None:
    from nvt_torchrec.base.startup import prepare_torch
    from nvt_torchrec.base.versions import check_training_stack
    from nvt_torchrec.training.reporting.metrics_log import set_up_logging
    from nvt_torchrec.training.settings.train_settings import THREE_DASHES, parse_settings

    settings = parse_settings(argv)
    if not settings.plan_only:  # which may go without data
        settings.check_data()  # before seconds of imports
    check_training_stack()  # also where TorchRec is missing
    set_up_logging()
    if THREE_DASHES in argv:
        log = logging.getLogger("nvt_torchrec")
        log.info("%s: read as --adagrad; the example's README has a dash too many", THREE_DASHES)
    prepare_torch()
    if settings.plan_only:
        from nvt_torchrec.training.sharding.plan_only import plan_only

        print(plan_only(settings))
        return
    from torch.distributed.elastic.multiprocessing.errors import record

    from nvt_torchrec.training.launch.distributed import process_group
    from nvt_torchrec.training.loop.train import train

    gc.freeze()  # imported objects stay: a collection that visits them takes a tenth of a second

    @record  # the launcher shows the first error of all ranks, by the second
    def run() -> None:
        try:
            with process_group() as group:
                result = train(settings, group)
                if settings.json and group.rank == 0:
                    print(json.dumps(vars(result)))
        except RuntimeError as error:
            if _follows_from_another(error):
                time.sleep(_REPORT_DELAY_S)
            raise

    run()


def _follows_from_another(error: RuntimeError) -> bool:
    """Tell whether another rank failed first, which closes its connections."""
    from torch.distributed import DistError

    text = str(error).lower()
    return isinstance(error, DistError) or "gloo" in text or "connection" in text


def main(argv: list[str] | None = None) -> int:
    """Train, and return the exit status; errors of input or settings are one message.

    Args:
        argv: Arguments of the command line; by default those of this process.
    """
    return run_main(lambda: _train(sys.argv[1:] if argv is None else argv), _report)


def _report(message: str) -> None:
    rank = int(os.environ.get("RANK", 0))
    if rank:
        time.sleep(_REPORT_DELAY_S)
        message = message.replace("error: ", f"error: [rank {rank}] ", 1)
    nvt_torchrec.base.interrupts.print_error(message)


if __name__ == "__main__":
    sys.exit(main())
