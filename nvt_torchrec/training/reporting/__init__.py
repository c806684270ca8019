"""Progress, metrics.jsonl, the training page and the profiler."""
