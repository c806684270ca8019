#!/usr/bin/env bash
# Checks and measurements on a GPU that is available for minutes only: `bash benchmarks/card.sh SECONDS`,
# from the top of the checkout, with this project's packages on PYTHONPATH or in the active environment.
#
# The most valuable steps come first. Each step has a time limit and prints its verdict, so that neither a step
# that hangs nor the end of the time spoils other results. docs/gpu.md explains how to use the figures.
#
#   WORK      directory of logs and outputs; by default in memory
#   NCCL_LIB  libnccl.so.2 of NCCL 2.30 or newer, which lets several ranks share a GPU; without it, the steps
#             with several ranks are skipped
#   REHEARSE  1: run on a CPU with small tables, without the steps that need a GPU
set -u
end=$((SECONDS + ${1:?pass the number of seconds for which the GPU is available}))
WORK=${WORK:-/dev/shm/card}
export WORK PYTHONPATH=$PWD:${PYTHONPATH:-}
mkdir -p "$WORK"
data=$WORK/OUT/criteo_binary/split
dd_blocks=128 rows=60000 batch=65536
[ -n "${REHEARSE:-}" ] && dd_blocks=8 rows=3000 max_table_rows=1000 batch=256 warm_up=1 steps=3
. benchmarks/gpu_flags.sh

# step SECONDS NAME COMMAND...: run a command within its time limit and the remaining time.
step() {
    local limit=$1 name=$2 left=$((end - SECONDS)) begin=$SECONDS status
    shift 2
    if [ "$left" -lt 15 ]; then
        echo "== skipped, no time left: $name"
        return
    fi
    [ "$limit" -gt "$left" ] && limit=$left
    echo "== $name, at most $limit s"
    timeout -k 5 "$limit" "$@"
    status=$?
    if [ "$status" = 0 ]; then
        echo "== passed in $((SECONDS - begin)) s: $name"
    else
        echo "== FAILED, status $status, in $((SECONDS - begin)) s: $name"
    fi
}

describe_machine() {
    [ -n "${REHEARSE:-}" ] || nvidia-smi -L
    python -c '
import fbgemm_gpu, torch, torchrec
print("torch", torch.__version__, "fbgemm", fbgemm_gpu.__version__, "torchrec", torchrec.__version__)
if torch.cuda.is_available():
    print("nccl", torch.cuda.nccl.version())'
    # Processing 3 GB/s of text needs 2 GB/s to the disk.
    for directory in /tmp "$WORK"; do
        echo "written to $directory, with fsync:"
        dd if=/dev/zero of="$directory/dd" bs=16M count="$dd_blocks" conv=fsync 2>&1 | tail -1
        rm -f "$directory/dd"
    done
}

train_by_default() {
    python -m nvt_torchrec.etl synthesize --output_path "$WORK/RAW" --days 2 --rows_per_day "$rows" &&
        python -m nvt_torchrec.etl run --engine cpu --input_path "$WORK/RAW" --output_path "$WORK/OUT" &&
        python -m nvt_torchrec.train_torchrec --no-boosted_trees --binary_path "$data" \
            --save_checkpoint_path "$WORK/CK" --log_path "$WORK/default" | tail -20
}

# The same global batch size for any number of ranks, so that all runs have the same losses.
same="--no-boosted_trees --adagrad --learning_rate 0.1 --epochs 1 --max_steps 40 --throughput_check_freq_within_epoch 1"
same="$same --limit_val_batches 4 --limit_test_batches 4"
train_ranks() {
    local ranks=$1 name=$2 batch=$((512 / $1))
    shift 2
    # shellcheck disable=SC2086 # flags are words
    LD_PRELOAD=${NCCL_LIB:-} python -m torch.distributed.run --standalone --nproc-per-node "$ranks" \
        benchmarks/shared_gpu.py --binary_path "$data" --batch_size "$batch" $same --log_path "$WORK/$name" "$@" | tail -5
}
compare() {
    python -m benchmarks.compare_losses "$WORK/one" "$WORK/$1" --tolerance "$2"
}
export -f describe_machine train_by_default train_ranks compare
export data same dd_blocks rows

step 20 "versions, disk" bash -c describe_machine
step 120 "README's commands, without a flag" bash -c train_by_default
if [ -z "${REHEARSE:-}" ]; then
    step 75 "checkpoints in a run, GPU to CPU to GPU, Adam" \
        python -m pytest -q -m gpu tests/gpu/test_training.py -k "checkpoint or before_the_first or (losses and adam)"
fi
step 40 "one rank" bash -c "train_ranks 1 one"
step 40 "one rank, TorchRec's pipeline" bash -c "FORCE_PIPELINE=1 train_ranks 1 pipeline && compare pipeline 1e-4"
if [ -n "${NCCL_LIB:-}${REHEARSE:-}" ]; then
    export NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_NVLS_ENABLE=0 NCCL_MAX_CTAS=2
    step 60 "two ranks" bash -c "train_ranks 2 two --sharding row_wise --save_checkpoint_path $WORK/ck2 && compare two 1e-3"
    step 120 "eight ranks" bash -c "train_ranks 8 eight --comm_precision bf16 --save_checkpoint_path $WORK/ck8 && compare eight 2e-2"
    unset NCCL_MULTI_RANK_GPU_ENABLE NCCL_NVLS_ENABLE NCCL_MAX_CTAS
fi

train="python -m benchmarks.train $mlperf --batch_sizes $batch -- --amp"
step 75 "a step of MLPerf's DLRM" $train
step 75 "with the defaults of --size large" $train $large_defaults
plain="python -m benchmarks.train $mlperf --batch_sizes $batch --plain"
step 120 "with these defaults, and without bins by embedding_bag, lookups in bf16 or the join's kernel" \
    $plain bins,lookups,join -- --amp $large_defaults
step 90 "MLPerf's DLRM, and without lookups in bf16 or the join's kernel" $plain lookups,join -- --amp
[ -n "${REHEARSE:-}" ] || step 75 "as CUDA graphs" $train --compile_dense

# start_cluster TASKS: a scheduler, and a worker that does so many tasks at once.
start_cluster() {
    dask scheduler --port "878$1" >"$WORK/scheduler$1.log" 2>&1 &
    # Two such workers share the card, one of them idle, so that each may take less than half of its memory.
    dask cuda worker "tcp://127.0.0.1:878$1" --nthreads "$1" --rmm-pool-size 60GB --pre-import nvt_torchrec.nvt_compat \
        >"$WORK/worker$1.log" 2>&1 &
}

# Two clusters for all runs, so that their workers start and compile once. The first run of each is to be compared:
# one task at a time leaves the lanes of the card empty at its end.
if [ -z "${REHEARSE:-}" ] && python -c 'import cudf, dask_cuda' 2>/dev/null; then
    make_big_log "$WORK/BIG" 11
    trap 'kill $(jobs -p)' EXIT
    start_cluster 2
    start_cluster 1
    sleep 15
    for run in "2 64 $WORK/etl" "1 64 $WORK/etl" "2 256 $WORK/etl" "1 256 $WORK/etl" "2 512 $WORK/etl" "2 64 /tmp/etl"; do
        read -r tasks block output <<<"$run"
        rm -rf "$output"
        step 45 "ETL, tasks at once: $tasks, blocks of $block MiB, to $output" python -m nvt_torchrec.etl run \
            --scheduler "tcp://127.0.0.1:878$tasks" --block_mb "$block" --input_path "$WORK/BIG" --output_path "$output"
        cat "$output/timings.json"
    done
fi
