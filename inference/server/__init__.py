"""Scoring over HTTP: ``python -m inference serve``.

A request passes through :mod:`.connections` (limits of connections), :mod:`.access` (request id,
API key, access log), :mod:`.admission` (limits of requests), :mod:`.app` (JSON → ids and dense
features) and :mod:`.batching` (waiting requests are scored together). Clients take turns
(:mod:`.fairness`). A process has one event loop and one thread for the model; :mod:`.workers`
starts several processes.
"""
