"""Train a sharded TorchRec DLRM on the output of ``python -m etl run``.

This is the program behind ``train_torchrec.py`` and, once installed, ``nvt-train``.
"""

from __future__ import annotations

import nvt_torchrec.base.interrupts  # before slow imports, so that Ctrl-C prints a single line

# isort: split
import gc
import json
import logging
import os
import sys
import time

from nvt_torchrec.base.errors import run_main

#: How long a rank waits, in seconds, before it reports an error that another rank reports, too. In
#: this time the launcher ends the rank, so the error is printed once. A lost connection means that
#: another rank failed; errors of input or settings mostly occur on all ranks, and rank 0 reports
#: them.
_REPORT_DELAY_S = 2.0


def _train(argv: list[str]) -> None:
    from nvt_torchrec.base.startup import prepare_torch
    from nvt_torchrec.base.versions import check_training_stack
    from nvt_torchrec.training.reporting.metrics_log import set_up_logging
    from nvt_torchrec.training.settings.train_settings import THREE_DASHES, parse_settings

    settings = parse_settings(argv)
    if not settings.plan_only:  # --plan_only works without data
        settings.check_data()  # before the imports below, which take seconds
    check_training_stack()  # reports a missing TorchRec, too
    set_up_logging()
    if THREE_DASHES in argv:
        log = logging.getLogger("nvt_torchrec")
        log.info("%s: read as --adagrad; the example's README has one dash too many", THREE_DASHES)
    prepare_torch()
    if settings.plan_only:
        from nvt_torchrec.training.sharding.plan_only import plan_only

        print(plan_only(settings))
        return
    from torch.distributed.elastic.multiprocessing.errors import record

    from nvt_torchrec.training.launch.distributed import process_group
    from nvt_torchrec.training.loop.train import train

    # Imported objects live as long as the process. Without freeze, each full garbage collection
    # would visit them, which takes a tenth of a second.
    gc.freeze()

    @record  # records the time of an error, so that the launcher shows the first one of all ranks
    def run() -> None:
        try:
            with process_group() as group:
                result = train(settings, group)
                if settings.json and group.rank == 0:
                    print(json.dumps(vars(result)))
        except RuntimeError as error:
            if _is_caused_by_other_rank(error):
                time.sleep(_REPORT_DELAY_S)
            raise

    run()


def _is_caused_by_other_rank(error: RuntimeError) -> bool:
    """Return whether another rank probably failed first, which closes its connections."""
    from torch.distributed import DistError

    text = str(error).lower()
    return isinstance(error, DistError) or "gloo" in text or "connection" in text


def main(argv: list[str] | None = None) -> int:
    """Train, and return the exit status; an error of input or settings prints a single message.

    Args:
        argv: The command-line arguments; None for those of this process.
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
