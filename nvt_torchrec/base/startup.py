"""Set a process up before it imports PyTorch: threads, and fewer warnings."""

from __future__ import annotations

import logging
import os
import sys
import warnings


def prepare_torch() -> None:
    """Set PyTorch up for a command line. Must be called before torch is imported.

    Messages of PyTorch and TorchRec about each other's internals are suppressed, unless Python was
    started with -W.
    """
    # OpenMP reads this when torch is loaded: idle threads sleep instead of spinning. Steps are
    # several times faster on cores that are shared with the loader, other ranks or other programs.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    if not sys.warnoptions:
        warnings.filterwarnings("ignore", module=r"(torch|torchrec|fbgemm_gpu)(\.|$)")
        # TorchRec keeps its state in ShardedTensors, and PyTorch warns of every call.
        warnings.filterwarnings("ignore", message=".*ShardedTensor", category=FutureWarning)
        # A warning of torch.export that is attributed to copyreg.
        warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)
        # A filter, because PyTorch resets the levels of its loggers.
        logging.getLogger("torch.fx._symbolic_trace").addFilter(
            lambda record: "is_fx_tracing" not in record.getMessage()
        )
        # FBGEMM 1.6 does not know its own version; base.versions checks which versions fit.
        logging.getLogger().addFilter(
            lambda record: "_fbgemm_torch_compat_table" not in record.getMessage()
        )
