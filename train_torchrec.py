#!/usr/bin/env python3
"""Train a sharded TorchRec DLRM on what ``python -m etl run`` wrote; see --help.

Started by ``torchx run -s local_cwd dist.ddp``, by ``torchrun``, or plainly as one process.
"""

import sys

from nvt_torchrec.train_torchrec import main

if __name__ == "__main__":
    sys.exit(main())
