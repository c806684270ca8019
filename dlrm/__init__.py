"""Training: DLRM model, sharding plan, optimizers, training and evaluation loops, checkpoints.

Importing this package imports neither torch nor TorchRec; its modules do so where they need it.
"""

from clicklog.versions import check_training_stack

check_training_stack()
