"""The ETL beside NVTabular and Polars: the same log to the same files."""
