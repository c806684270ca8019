"""The recipes of docs/recipes on synthetic look-alikes of the public logs."""
