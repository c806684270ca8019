"""Parquet files: footers read without trust, and numbers written faster than Arrow writes them."""
