"""Feature specs that ship with this project, as TOML files; ``load_spec`` finds them by name."""
