"""Raw click log → fitted, saved NVTabular Workflow + parquet. Knows no torch."""
