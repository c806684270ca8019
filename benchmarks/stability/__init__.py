"""How far results depend on the seed."""
