"""The training loop: steps, evaluations, early stopping, and the work after the last step."""
