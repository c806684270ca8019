"""ETL, loader, training and inference on a GPU, beside what limits each."""
