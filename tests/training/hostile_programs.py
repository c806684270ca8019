"""Run in a process of its own: programs that were changed at random, of models in a JSON file.

Prints what became of them. Fails at the first that raises another error than this project's, opens
a file or compiles Python while it is opened or run, or takes more than a few seconds or 1 GiB.
"""

from __future__ import annotations

import copy
import json
import random
import resource
import sys
import time
from collections import Counter
from types import FrameType

import torch

from nvt_torchrec.base.errors import ClickLogError
from nvt_torchrec.models.config import ModelConfig
from nvt_torchrec.models.head import build_head
from nvt_torchrec.models.program_operators import OPERATORS
from tests.mutations import mutated

#: As an option of ``sum``, it ran the command when options were written into Python.
KEY = "dim = [1]) if __import__('os').system('true') else dict(dim"
NUMBERS = (0, 1, 2, 3, 4, -1, -2, 7, 1000, 2**20, 2**31, 2**62, -(2**63), 0.5, 1e308)
_ROWS, _MOST_SECONDS, _MOST_MEMORY = 3, 10, 1 << 30


def use(value: object) -> str:
    """Open a model, give it weights, and score rows; return what came of it."""
    try:
        config = ModelConfig.from_dict(value)
        head = build_head(config).eval()
        for tensor in head.state_dict().values():
            tensor.fill_(1)
        dense = torch.ones(_ROWS, len(config.dense))
        vectors = torch.ones(_ROWS, len(config.categorical), config.embedding_dim)
        raw = {name: torch.ones(_ROWS, len(of)).long() for name, of in head.raw_columns.items()}
        scores = head(dense, vectors, raw)
    except ClickLogError as error:
        return type(error).__name__ if "\n" not in error.what else sys.exit(error.what)
    assert scores.shape == (_ROWS, len(config.labels))
    return "scored"


def with_another_argument(program: dict, seed: int) -> dict:
    """Return a program of the right form, with another operator, argument, option or shape."""
    rng, program = random.Random(seed), copy.deepcopy(program)
    step, steps = rng.choice(program["steps"]), len(program["steps"])
    kind = rng.randrange(6)
    if kind == 0:
        step["operator"] = rng.choice(sorted(OPERATORS))
    elif kind == 1:
        results = 2 + len(program["tensors"]) + steps
        step["arguments"][rng.randrange(len(step["arguments"]))] = {
            "result": rng.randrange(results)
        }
    elif kind == 2:
        step["options"][rng.choice(("dim", "dtype", "out", "alpha", KEY))] = rng.choice(NUMBERS)
    elif kind == 3:
        rng.choice(program["tensors"])["shape"] = rng.choices(NUMBERS, k=rng.randrange(4))
    elif kind == 4:
        step["arguments"].append(rng.choice((*NUMBERS, NUMBERS, [{"result": 1}])))
    else:
        at = rng.randrange(len(step["arguments"]))
        step["arguments"][at] = rng.choice((*NUMBERS, rng.choices(NUMBERS, k=3), "tanh", None))
    return program


def memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def main(file: str, rounds: int) -> None:
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_DATA, (6 << 30, 6 << 30))  # the machine stays alive
    with open(file) as opened:
        models = json.load(opened)
    for model in models:
        assert use(model) == "scored"
    watched: list[str] = []

    def audit(event: str, arguments: tuple) -> None:
        if event in ("compile", "open", "os.system", "subprocess.Popen"):
            frame: FrameType | None = sys._getframe()
            while frame and "importlib" not in frame.f_code.co_filename:  # PyTorch imports late
                frame = frame.f_back
            if not frame:
                watched.append(f"{event} {arguments!r:.200}")

    sys.addaudithook(audit)
    counts: Counter[str] = Counter()
    for seed in range(rounds):
        value = dict(models[seed % len(models)])
        change = mutated if seed % 2 else with_another_argument
        value["program"] = change(value["program"], seed)
        print(f"seed {seed}", file=sys.stderr, flush=True)
        before, begin = memory(), time.process_time()
        counts[use(value)] += 1
        assert not watched, watched
        assert time.process_time() - begin < _MOST_SECONDS
        assert memory() - before < _MOST_MEMORY
    print(json.dumps(counts))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
