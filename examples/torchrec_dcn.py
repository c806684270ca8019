"""TorchRec's DLRM_DCN, sharded over the ranks and fed by KJTLoader; resumes in mid-epoch.

    torchrun --standalone --nproc-per-node 2 torchrec_dcn.py OUT/criteo_binary/split/train CKPT 500

trains 500 steps of an epoch; with more steps, it goes on as a run without the break.
"""

import json
import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed import DistributedModelParallel, TrainPipelineSparseDist
from torchrec.models.dlrm import DLRM_DCN, DLRMTrain
from torchrec.optim import RowWiseAdagrad, keyed
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.optimizers import in_backward_optimizer_filter

from nvt_torchrec import KJTLoader

data, checkpoint, last_step = sys.argv[1:]
cuda = torch.cuda.is_available()
device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if cuda else "cpu")
dist.init_process_group("nccl" if cuda else "gloo")
ranks = {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
loader = KJTLoader(data, batch_size=64, **ranks, shuffle=True, device=device)
columns = loader.schema

torch.manual_seed(0)
sizes = dict(zip(columns.categorical, columns.table_sizes, strict=True))
configs = [EmbeddingBagConfig(size, 16, name, feature_names=[name]) for name, size in sizes.items()]
tables = EmbeddingBagCollection(configs, device=torch.device("meta"))
apply_optimizer_in_backward(RowWiseAdagrad, tables.parameters(), {"lr": 0.05})
dcn = DLRM_DCN(tables, len(columns.dense), [32, 16], [32, 1], 2, 8, dense_device=device)
model = DistributedModelParallel(DLRMTrain(dcn), device=device)
others = dict(in_backward_optimizer_filter(model.named_parameters()))
adagrad = keyed.KeyedOptimizerWrapper(others, lambda given: torch.optim.Adagrad(given, lr=0.05))
optimizer = keyed.CombinedOptimizer([model.fused_optimizer, adagrad])

states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "loader": ""}
if os.path.exists(checkpoint):
    dcp.load(states, checkpoint_id=checkpoint)
    model.load_state_dict(states["model"])
    optimizer.load_state_dict(states["optimizer"])
    loader.load_state_dict(json.loads(states["loader"]))
_, step = loader.position
pipeline, batches = TrainPipelineSparseDist(model, optimizer, device), iter(loader)
while step < min(int(last_step), len(loader)):
    loss, *_ = pipeline.progress(batches)
    step += 1
    if ranks["rank"] == 0:
        print(f"step {step} of {len(loader)}: loss {loss.item():.6f}")
states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
states["loader"] = json.dumps(loader.state_dict(trained_steps=step))  # the pipeline draws ahead
dcp.save(states, checkpoint_id=checkpoint)
dist.destroy_process_group()
