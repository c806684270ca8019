"""Train on the parquet of a workflow with arbitrary NVTabular operators.

    python nvtabular_workflow.py clicks.csv DATA
    nvt-train --binary_path DATA

The label is the column tagged TARGET, the outputs of Categorify are categorical columns, and all
other columns are dense. To encode new rows, load DATA/workflow with nvtabular.Workflow.load.
"""

import sys

import nvt_torchrec.nvt_compat  # noqa: F401  # before NVTabular

import nvtabular
import pandas as pd
from merlin.schema import Tags
from nvtabular import ops

source, target = sys.argv[1:]
frame = pd.read_csv(source).sort_values("time")
frame["weekday"] = pd.to_datetime(frame.time).dt.weekday

single = ["user", "item", "weekday"] >> ops.Categorify(freq_threshold=2)
pairs = [["category", "device"]] >> ops.Categorify(encode_type="combo")
price = ["price"] >> ops.FillMissing() >> ops.LogOp() >> ops.Normalize()
rate = [["category"]] >> ops.TargetEncoding("clicked", kfold=5, p_smooth=20) >> ops.Normalize()
label = ["clicked"] >> ops.AddTags([Tags.TARGET])
workflow = nvtabular.Workflow(single + pairs + price + rate + label)

# The frame is sorted by time: the last tenth is test, and the tenth before it is valid.
shares = {"train": (0, 0.8), "valid": (0.8, 0.9), "test": (0.9, 1)}
splits = {}
for name, (begin, end) in shares.items():
    rows = frame.iloc[int(begin * len(frame)) : int(end * len(frame))]
    splits[name] = nvtabular.Dataset(rows, npartitions=4)
workflow.fit(splits["train"])
for name, split in splits.items():
    workflow.transform(split).to_parquet(f"{target}/{name}", output_files=4)
workflow.save(f"{target}/workflow")
