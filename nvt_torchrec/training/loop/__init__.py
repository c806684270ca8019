"""Training steps, evaluations, when they end, and what follows the last one."""
