"""Training: DLRM model, sharding plan, optimizers, training and evaluation loops, checkpoints.

Importing this package imports neither torch nor TorchRec; its modules do so where they need them.
Without TorchRec, as on a machine that only serves, checkpoints can be read, and :mod:`models`,
:mod:`models.metrics` and :mod:`base.startup` work.
"""

from nvt_torchrec.base.versions import check_training_stack, installed_version

if installed_version("torchrec"):
    check_training_stack()
