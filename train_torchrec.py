#!/usr/bin/env python3
"""Train a sharded TorchRec DLRM on the output of ``python -m etl run``; see --help.

Start it with ``torchx run -s local_cwd dist.ddp``, with ``torchrun``, or directly as one process.
"""

import sys

from nvt_torchrec.train_torchrec import main

if __name__ == "__main__":
    sys.exit(main())
