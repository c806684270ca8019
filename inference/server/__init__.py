"""Scoring over HTTP: ``python -m inference serve``.

A request goes through :mod:`.admission` (limits of number, size and time), :mod:`.app` (JSON → ids
and dense features, or the reason why not) and :mod:`.batching` (requests that wait together go
through the model together). One process, one event loop, one thread for the model.
"""
