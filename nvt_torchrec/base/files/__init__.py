"""Atomic writes, validated JSON with digests, journals of finished units, memory-mapped arrays."""
