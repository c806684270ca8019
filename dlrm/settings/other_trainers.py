"""Flags of other trainers and of earlier versions, and what to use instead of them."""

from __future__ import annotations

#: Flags of other trainers or their READMEs, and what they are called here; docs/flags.md has all.
RENAMED = {
    "--lr": "--learning_rate",
    "--warmup_steps": "--lr_warmup_steps",
    "--decay_steps": "--lr_decay_steps",
    "--decay_start_step": "--lr_decay_start",
    "--dataset": "--binary_path",
    "--in_memory_binary_criteo_path": "--binary_path",
    "--top_mlp_sizes": "--over_arch_layer_sizes",
    "--bottom_mlp_sizes": "--dense_arch_layer_sizes",
    "--shuffle": "--shuffle_training_set",
    "--shuffle_batch_order": "--shuffle_training_set",
    "--interaction_op": "--interaction_type",
    "--shuffle_batches": "--shuffle_training_set",
    "--print_freq": "--throughput_check_freq_within_epoch",
    "--test_freq": "--validation_freq_within_epoch",
    "--cuda_graphs": "--compile_dense",
    "--output_dir": "--save_checkpoint_path",
    "--fp16": "--amp",
    "--Adam_embedding_optimizer": "--optimizer adam",
    "--Adam_MLP_optimizer": "--optimizer adam",
}
#: Their flags that have no place here, and why.
LEFT_OUT = {
    "--auc_device": "AUROC is exact, over all ranks, on rank 0's CPU",
    "--backend": "nccl on GPUs, gloo on CPUs",
    "--base_device": "GPUs if there are any; `CUDA_VISIBLE_DEVICES=` hides them",
    "--bottom_features_ordered": "every checkpoint loads on any number of ranks",
    "--collect_multi_hot_freqs_stats": "the ETL's report has the frequencies of all ids",
    "--dataset_name": "`--binary_path` says which data, and Kaggle's log has a spec of its own",
    "--embedding_type": "FBGEMM's tables on all devices; `--sharding_file` chooses their kernels",
    "--feature_spec": "`.merlin/schema.json` lies beside the data",
    "--freeze_embeddings": "for debugging their kernels",
    "--freeze_mlps": "for debugging their kernels",
    "--loss_scale": "bfloat16 needs none",
    "--mmap_mode": "row groups are read as they are needed",
    "--optimized_mlp": "it is Apex's; `--compile_dense` fuses the layers",
    "--self_interaction": "later versions have none either",
    **dict.fromkeys(
        (
            "--dataset_type",
            "--synthetic_dataset",
            "--synthetic_dataset_num_entries",
            "--synthetic_dataset_numerical_features",
            "--num_numerical_features",
            "--synthetic_dataset_table_sizes",
            "--synthetic_dataset_use_feature_spec",
        ),
        "the data are the ETL's parquet; `python -m etl synthesize` makes a random log",
    ),
    **dict.fromkeys(
        (
            "--multi_hot_sizes",
            "--multi_hot_distribution_type",
            "--synthetic_multi_hot_criteo_path",
        ),
        "list columns of the parquet are multi-hot",
    ),
    **dict.fromkeys(
        ("--inference_benchmark_batch_sizes", "--inference_benchmark_steps"),
        "`python -m inference benchmark` measures scoring",
    ),
    "--dataset_subset": "`--limit_train_batches` takes the number of steps",
    "--decay_end_lr": "the decay ends at 1e-7",
    "--decay_power": "it is 2, as by default there",
    "--pin_memory": "memory is always pinned on GPUs",
    "--print_lr": "each line of progress has it, and metrics.jsonl",
    "--print_sharding_plan": "training.html shows the plan, `--plan_only` prints one",
    "--test_after": "raise `--validation_freq_within_epoch` for fewer evaluations",
    "--warmup_factor": "it is 0, as by default there: the warm-up begins at 0",
}
_CHOSEN = "it was removed: the program chooses what gives the same results fastest"
#: Flags of earlier versions.
REMOVED = {
    "--bounds_check": "it was removed: the loader checks every id",
    "--index_type": _CHOSEN,
    "--interaction_kernel": _CHOSEN,
    "--lookup_precision": _CHOSEN,
    "--lr_policy": "it was removed: the schedule is dlrm_main's, see --lr_warmup_steps and "
    "--lr_decay_steps",
    "--pad_inputs": _CHOSEN,
    "--profile_steps": "it was removed: --profile traces ten steps",
    "--world_size": "it was removed: give the number of GPUs to --plan_only",
}
#: Each of these flags → what to do instead, in one sentence.
HINTS = {
    **REMOVED,
    **{flag: f"it is called {name} here" for flag, name in RENAMED.items()},
    **{flag: f"leave it out: {why.replace('`', '')}" for flag, why in LEFT_OUT.items()},
    "---adagrad": "it takes two dashes: --adagrad (three are a typo in the example's README)",
}
