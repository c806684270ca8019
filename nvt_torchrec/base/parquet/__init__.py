"""Write parquet files of numbers, faster than Arrow: uncompressed pages with checksums."""
