"""What a loader can read besides parquet files."""
