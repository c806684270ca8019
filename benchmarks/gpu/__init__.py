"""ETL, loader and training on a GPU, beside what limits each. None of it has run on one yet."""
