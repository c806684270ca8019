"""The regression that a model starts from, and the baselines that it is compared with."""
