"""Compare the ETL with NVTabular and Polars: the same log to the same files."""
