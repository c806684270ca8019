"""Shuffling of the training rows in bounded memory."""
