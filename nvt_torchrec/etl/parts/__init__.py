"""The parquet parts of the splits: written, shuffled, sampled."""
