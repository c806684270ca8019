"""Flags of other trainers, and what to use instead of them."""

from __future__ import annotations


def _expand_flags(flags: dict[str, str]) -> dict[str, str]:
    """Return flag → text of a dict text → flags that it is about."""
    return {flag: text for text, names in flags.items() for flag in names.split()}


#: Flags of other trainers or their READMEs, and what they are called here; docs/flags.md has all.
RENAMED = _expand_flags(
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
        "--stop_at_auroc": "--validation_auroc --auc_threshold",
        "--optimizer adam": "--Adam_embedding_optimizer --Adam_MLP_optimizer",
    }
)
#: Their flags that have no place here; docs/flags.md says why.
_LEFT_OUT = (
    "--auc_device --backend --base_device --bottom_features_ordered "
    "--collect_multi_hot_freqs_stats --dataset_name --dataset_subset --dataset_type "
    "--decay_end_lr --decay_power --embedding_type --feature_spec --freeze_embeddings "
    "--freeze_mlps --inference_benchmark_batch_sizes --inference_benchmark_steps --loss_scale "
    "--mmap_mode --multi_hot_distribution_type --multi_hot_sizes --num_numerical_features "
    "--optimized_mlp --pin_memory --print_lr --print_sharding_plan --self_interaction "
    "--synthetic_dataset --synthetic_dataset_dir --synthetic_dataset_num_entries "
    "--synthetic_dataset_numerical_features --synthetic_dataset_table_sizes "
    "--synthetic_dataset_use_feature_spec --synthetic_multi_hot_criteo_path --test_after "
    "--warmup_factor"
)
LEFT_OUT = set(_LEFT_OUT.split())
_INTERACTIONS = "cuda_dot and dot are original, cat is left out"
#: Each of these flags, or flags and values → what to do instead, in one sentence.
HINTS = {
    **{flag: f"it is called {name} here" for flag, name in RENAMED.items()},
    **dict.fromkeys(LEFT_OUT, "leave it out: docs/flags.md says why, or what to use"),
    "--interaction_op": f"it is called --interaction_type here: {_INTERACTIONS}",
    **{f"--interaction_type {name}": _INTERACTIONS for name in ("cuda_dot", "dot", "cat")},
    "--mode inference_benchmark": "measure scoring with `python -m benchmarks.inference`",
}
