"""What a process does before it imports PyTorch: settings of threads, and fewer warnings."""

from __future__ import annotations

import logging
import os
import sys
import warnings


def prepare_torch() -> None:
    """Set PyTorch up for a command line; call it before anything imports torch.

    Messages of PyTorch and TorchRec about each other's internals are left out, unless Python was
    started with -W.
    """
    # Read by OpenMP when torch is loaded: threads that wait sleep instead of spinning, which on
    # cores shared with the loader, other ranks or other programs makes steps several times faster.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    if not sys.warnoptions:
        warnings.filterwarnings("ignore", module=r"(torch|torchrec|fbgemm_gpu)(\.|$)")
        # TorchRec keeps its state in ShardedTensors; PyTorch warns of every call.
        warnings.filterwarnings("ignore", message=".*ShardedTensor", category=FutureWarning)
        # A warning of torch.export that appears as one of copyreg.
        warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)
        logging.getLogger("torch.fx._symbolic_trace").addFilter(  # PyTorch sets levels back
            lambda record: "is_fx_tracing" not in record.getMessage()
        )
        # FBGEMM 1.6 has no entry for itself; which versions fit is checked by base.versions.
        logging.getLogger().addFilter(
            lambda record: "_fbgemm_torch_compat_table" not in record.getMessage()
        )
