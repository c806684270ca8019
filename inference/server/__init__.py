"""Scoring over HTTP: ``python -m inference serve``.

A request comes over a connection with limits (:mod:`.connections`), gets a name and shows its key
(:mod:`.access`), and goes through :mod:`.admission` (limits of number, size and time), :mod:`.app`
(JSON → ids and dense features, or the reason why not) and :mod:`.batching` (requests that wait
together go through the model together). Clients take turns (:mod:`.fairness`). A process has one
event loop and one thread for the model; :mod:`.workers` starts several.
"""
