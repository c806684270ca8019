"""Serve an exported model with FastAPI and ONNX Runtime, as such a service is usually written.

The server prints its address, and imports nothing of ours. Columns are converted to tensors as
docs/onnx.md describes: to strings, integers or floats, with the values that represent missing ones,
and with the lengths of lists.
"""

import socket
import sys
from typing import Any

import numpy as np
import uvicorn
from fastapi import FastAPI
from onnxruntime import InferenceSession, SessionOptions
from pydantic import BaseModel

KINDS = {
    "tensor(string)": (object, ""),
    "tensor(int64)": (np.int64, -(2**63)),
    "tensor(double)": (np.float64, np.nan),
}
options = SessionOptions()
options.intra_op_num_threads = 1
session = InferenceSession(sys.argv[1], options)
inputs = {given.name: (*KINDS[given.type], len(given.shape)) for given in session.get_inputs()}
app = FastAPI()


class Request(BaseModel):
    """The body of a request."""

    rows: list[dict[str, Any]]


@app.post("/predict")
async def predict(request: Request) -> dict[str, list[float]]:
    """Score rows."""
    tensors = {}
    for name, (dtype, missing, rank) in inputs.items():
        if name.removesuffix(".length") != name:
            continue
        values = [row.get(name) for row in request.rows]
        if rank == 2:
            lists = [value or [] for value in values]
            lengths = [len(items) for items in lists]
            width = max(1, *lengths)
            values = [items + [missing] * (width - len(items)) for items in lists]
            tensors[f"{name}.length"] = np.array(lengths)
        else:
            values = [missing if value is None else value for value in values]
        tensors[name] = np.array(values, dtype)
    (probabilities,) = session.run(None, tensors)
    return {"probabilities": probabilities.tolist()}


if __name__ == "__main__":
    listener = socket.create_server(("127.0.0.1", 0))
    print(f"serving on http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    config = uvicorn.Config(app, access_log=False, log_level="warning")
    uvicorn.Server(config).run(sockets=[listener])
