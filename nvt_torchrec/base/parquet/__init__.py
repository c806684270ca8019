"""Parquet files: read untrusted footers safely, and write numbers faster than Arrow does."""
