"""Files: atomic writes, validated JSON with digests, journals, memory-mapped arrays."""
