"""Do the same ETL with NVTabular 23.08 as published, through its plain API in one CPU process.

Run by an interpreter with nvtabular and its dependencies of 2024; imports nothing of ours. The
input follows NVTabular's documentation: a CSV Dataset with hexadecimal categories as strings.
"""

import argparse
import glob
import os

import numpy as np
import nvtabular as nvt
from nvtabular import ops

DENSE = [f"int_{i}" for i in range(13)]
CATEGORICAL = [f"cat_{i}" for i in range(26)]


def log_shifted(column):
    """Return log(x + 3), float64."""
    return np.log(column.astype("float64") + 3)


def main():
    """Fit a Workflow to TSV files and write their transformed rows as parquet."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--input", required=True)
    parser.add_argument("--output", required=True)
    args = parser.parse_args()
    files = sorted(glob.glob(f"{args.input}/day_*"), key=lambda f: int(f.rsplit("_", 1)[1]))

    def make_dataset(paths):
        return nvt.Dataset(
            paths,
            engine="csv",
            sep="\t",
            header=None,
            names=["label", *DENSE, *CATEGORICAL],
            dtype={
                "label": "int32",
                **dict.fromkeys(DENSE, "float64"),  # integers, and NaN where missing
                **dict.fromkeys(CATEGORICAL, "str"),
            },
            part_size="64MB",
        )

    categorical = CATEGORICAL >> ops.Categorify(out_path=args.output, dtype=np.dtype("int32"))
    dense = DENSE >> ops.FillMissing(0) >> ops.Clip(min_value=-2)
    dense = dense >> ops.LambdaOp(log_shifted, dtype=np.float64)
    dense = dense >> ops.Normalize(out_dtype=np.float32)
    label = ["label"] >> ops.LambdaOp(lambda c: c.astype("float32"), dtype=np.float32)
    workflow = nvt.Workflow(label + dense + categorical)
    train = make_dataset(files[:-1])
    workflow.fit(train)
    workflow.save(os.path.join(args.output, "workflow"))
    for name, rows in (("train", train), ("last_day", make_dataset(files[-1:]))):
        workflow.transform(rows).to_parquet(
            os.path.join(args.output, name), dtypes=dict.fromkeys(CATEGORICAL, np.int32)
        )


if __name__ == "__main__":
    main()
