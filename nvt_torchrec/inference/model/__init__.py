"""The trained model, arranged for scoring; its tables, weights and bundles."""
