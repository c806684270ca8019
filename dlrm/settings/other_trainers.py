"""Flags of other trainers and of earlier versions, and what to use instead of them."""

from __future__ import annotations


def _by_flag(flags: dict[str, str]) -> dict[str, str]:
    """Return flag → text of a dict text → flags that it is about."""
    return {flag: text for text, names in flags.items() for flag in names.split()}


#: Flags of other trainers or their READMEs, and what they are called here; docs/flags.md has all.
RENAMED = _by_flag(
    {
        "--learning_rate": "--lr",
        "--lr_warmup_steps": "--warmup_steps",
        "--lr_decay_steps": "--decay_steps",
        "--lr_decay_start": "--decay_start_step",
        "--binary_path": "--dataset --in_memory_binary_criteo_path",
        "--over_arch_layer_sizes": "--top_mlp_sizes",
        "--dense_arch_layer_sizes": "--bottom_mlp_sizes",
        "--shuffle_training_set": "--shuffle --shuffle_batch_order --shuffle_batches",
        "--interaction_type": "--interaction_op",
        "--throughput_check_freq_within_epoch": "--print_freq",
        "--validation_freq_within_epoch": "--test_freq",
        "--compile_dense": "--cuda_graphs",
        "--save_checkpoint_path": "--output_dir",
        "--amp": "--fp16",
        "--optimizer adam": "--Adam_embedding_optimizer --Adam_MLP_optimizer",
    }
)
#: Their flags that have no place here, and why.
LEFT_OUT = _by_flag(
    {
        "AUROC is exact, over all ranks, on rank 0's CPU": "--auc_device",
        "nccl on GPUs, gloo on CPUs": "--backend",
        "GPUs if there are any; `CUDA_VISIBLE_DEVICES=` hides them": "--base_device",
        "every checkpoint loads on any number of ranks": "--bottom_features_ordered",
        "the ETL's report has the frequencies of all ids": "--collect_multi_hot_freqs_stats",
        "`--binary_path` says which data, and Kaggle's log has a spec of its own": "--dataset_name",
        "FBGEMM's tables on all devices; `--sharding_file` chooses their kernels": (
            "--embedding_type"
        ),
        "`.merlin/schema.json` lies beside the data": "--feature_spec",
        "for debugging their kernels": "--freeze_embeddings --freeze_mlps",
        "bfloat16 needs none": "--loss_scale",
        "row groups are read as they are needed": "--mmap_mode",
        "it is Apex's; `--compile_dense` fuses the layers": "--optimized_mlp",
        "later versions have none either": "--self_interaction",
        "the data are the ETL's parquet; `python -m etl synthesize` makes a random log": (
            "--dataset_type --synthetic_dataset --synthetic_dataset_num_entries "
            "--synthetic_dataset_numerical_features --num_numerical_features "
            "--synthetic_dataset_table_sizes --synthetic_dataset_use_feature_spec"
        ),
        "list columns of the parquet are multi-hot": (
            "--multi_hot_sizes --multi_hot_distribution_type --synthetic_multi_hot_criteo_path"
        ),
        "`python -m inference benchmark` measures scoring": (
            "--inference_benchmark_batch_sizes --inference_benchmark_steps"
        ),
        "`--limit_train_batches` takes the number of steps": "--dataset_subset",
        "the decay ends at 1e-7": "--decay_end_lr",
        "it is 2, as by default there": "--decay_power",
        "memory is always pinned on GPUs": "--pin_memory",
        "each line of progress has it, and metrics.jsonl": "--print_lr",
        "training.html shows the plan, `--plan_only` prints one": "--print_sharding_plan",
        "raise `--validation_freq_within_epoch` for fewer evaluations": "--test_after",
        "it is 0, as by default there: the warm-up begins at 0": "--warmup_factor",
    }
)
#: Flags of earlier versions.
REMOVED = _by_flag(
    {
        "it was removed: the loader checks every id": "--bounds_check",
        "it was removed: the program chooses what gives the same results fastest": (
            "--index_type --interaction_kernel --lookup_precision --pad_inputs"
        ),
        "it was removed: the schedule is dlrm_main's, see --lr_warmup_steps and --lr_decay_steps": (
            "--lr_policy"
        ),
        "it was removed: --profile traces ten steps": "--profile_steps",
        "it was removed: give the number of GPUs to --plan_only": "--world_size",
    }
)
#: Each of these flags → what to do instead, in one sentence.
HINTS = {
    **REMOVED,
    **{flag: f"it is called {name} here" for flag, name in RENAMED.items()},
    **{flag: f"leave it out: {why.replace('`', '')}" for flag, why in LEFT_OUT.items()},
    "---adagrad": "it takes two dashes: --adagrad (three are a typo in the example's README)",
}
