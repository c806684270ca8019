"""Optimizers, learning rates and schedules."""
