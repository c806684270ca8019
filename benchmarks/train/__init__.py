"""Training beside facebookresearch/dlrm's dlrm_main.py and beside a bare loop."""
