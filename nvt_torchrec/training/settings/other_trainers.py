"""Flags of other trainers."""

from __future__ import annotations

#: Flags of other trainers or their READMEs, and what they are called here; docs/flags.md has all.
RENAMED = {
    flag: name
    for name, flags in {
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
    }.items()
    for flag in flags.split()
}
