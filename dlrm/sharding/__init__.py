"""Plan how the tables are sharded over the ranks, and shard the model."""
