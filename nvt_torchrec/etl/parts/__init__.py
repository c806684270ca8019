"""The parquet parts of the splits: written, sampled."""
