"""Files that are whole or absent, validated JSON, and memory-mapped arrays."""
