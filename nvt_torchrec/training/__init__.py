"""Training: data, what a model starts from, sharding, optimizers, the loop, checkpoints, reports.

Importing this package imports neither torch nor TorchRec; its modules do so where they need them.
"""

from nvt_torchrec.base.versions import check_training_stack, installed_version

if installed_version("torchrec"):
    check_training_stack()
