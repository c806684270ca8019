"""From the footers and pages of parquet files to columns."""
