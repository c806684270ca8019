"""A torchx component that trains on one or many machines, under any of torchx's schedulers.

    torchx run -s slurm nvt_torchrec/dlrm/launch/component.py:train -j 2x8 \\
        --gpu 8 --cpu 96 --memMB 800000 -- …

The flags of ``train_torchrec.py`` follow ``--``. Unlike ``dist.ddp`` it lets torchrun restart
failed ranks (``--max_restarts``), and it needs no path of the trainer: it runs the module that is
installed in the image or lies in the working directory.
"""

# torchx reads the annotations, as objects, and takes only typing's names for lists and dicts.
# ruff: noqa: UP006, UP035, UP045

import shlex
from typing import Dict, List, Optional

from torchx import specs
from torchx.components.dist import parse_nnodes


def train(
    *flags: str,
    j: str = "1x1",
    name: str = "train-torchrec",
    image: str = "",
    cpu: int = 4,
    gpu: int = 0,
    memMB: int = 16384,  # noqa: N803, torchx's spelling
    h: str = "",
    max_restarts: int = 0,
    max_retries: int = 0,
    port: int = 29500,
    env: Optional[Dict[str, str]] = None,
    mounts: Optional[List[str]] = None,
) -> specs.AppDef:
    """Train a sharded DLRM: one torchrun per machine, which starts and watches its ranks.

    Args:
        flags: the flags of train_torchrec.py
        j: machines x ranks per machine; one rank per GPU
        name: the name of the job
        image: an image with this project installed, for schedulers that start containers
        cpu: CPUs per machine
        gpu: GPUs per machine
        memMB: main memory per machine
        h: a resource registered with torchx, instead of cpu, gpu and memMB
        max_restarts: the most times that torchrun restarts all ranks after a failure; with
            --checkpoint_dir and --resume among the flags they go on from the newest checkpoint
        max_retries: the most times that the scheduler restarts the job; give --resume among
            the flags
        port: the port of the first machine for the rendezvous; unused on one machine
        env: environment variables of all ranks
        mounts: as for dist.ddp: type=bind,src=/host,dst=/job
    """
    least, machines, ranks, nodes = parse_nnodes(j)
    endpoint = "localhost:0"  # a free port
    if machines > 1:
        # a shell variable that schedulers set, but some not on the first machine
        endpoint = f"$${{{specs.macros.rank0_env}:=localhost}}:{port}"
    trainer = shlex.join(flags).replace("$", "$$")
    text = (
        f'torchrun --rdzv-backend c10d --rdzv-id "{specs.macros.app_id}" '
        f'--rdzv-endpoint "{endpoint}" --nnodes {nodes} --nproc-per-node {ranks} '
        f"--max-restarts {max_restarts} -m train_torchrec {trainer}"
    )
    role = specs.Role(
        name=name,
        image=image,
        entrypoint="bash",
        args=["-c", text],
        env=env or {},
        num_replicas=machines,
        min_replicas=least,
        max_retries=max_retries,
        port_map={"c10d": port},
        resource=specs.resource(cpu=cpu, gpu=gpu, memMB=memMB, h=h or None),
        mounts=specs.parse_mounts(mounts) if mounts else [],
    )
    return specs.AppDef(name=name, roles=[role])
