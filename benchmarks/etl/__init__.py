"""The ETL beside NVTabular, Polars and DuckDB: the same log to the same files."""
