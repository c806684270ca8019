"""ETL, loader and training on a GPU, beside what limits each."""
