"""Flags of other trainers that have no counterpart here."""

from __future__ import annotations

#: docs/flags.md says for each flag why, or what to use instead. Flags that only have another name
#: here are aliases in their declarations (:mod:`training.settings.fields`).
# fmt: off
LEFT_OUT = frozenset({
    "--auc_device", "--backend", "--base_device", "--bottom_features_ordered",
    "--collect_multi_hot_freqs_stats", "--dataset_name", "--dataset_subset", "--dataset_type",
    "--decay_end_lr", "--decay_power", "--disable_algorithm_search", "--dp_sharding_threshold",
    "--embedding_type", "--feature_spec", "--freeze_embeddings", "--freeze_mlps",
    "--gen_loss_summary", "--inference_benchmark_batch_sizes", "--inference_benchmark_steps",
    "--init_accu", "--interaction_branch1_layer_sizes", "--interaction_branch2_layer_sizes",
    "--loss_scale", "--mem_comm_bw_ratio", "--mem_comm_work_ratio", "--minimum_training_time",
    "--mmap_mode", "--multi_hot_distribution_type", "--multi_hot_sizes", "--num_gpus_per_node",
    "--num_numerical_features", "--optimized_mlp", "--pin_memory", "--print_lr",
    "--print_sharding_plan", "--scaler", "--self_interaction", "--synthetic_dataset",
    "--synthetic_dataset_dir", "--synthetic_dataset_num_entries",
    "--synthetic_dataset_numerical_features", "--synthetic_dataset_table_sizes",
    "--synthetic_dataset_use_feature_spec", "--synthetic_multi_hot_criteo_path", "--test_after",
    "--warmup_factor",
})
# fmt: on
