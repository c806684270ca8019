"""Scoring over HTTP: ``python -m inference serve``.

:mod:`.app` reads a request and encodes its rows, :mod:`.batching` scores the rows of waiting
requests together, :mod:`.reload` replaces the model when the bundle changes, :mod:`.processes`
starts the server, and :mod:`.forked_workers` runs it in several processes. A process has one event
loop, which also scores small requests of quick models, one thread for the model, and two for
parsing large requests. API keys, TLS and limits per client are left to a proxy:
``deploy/nginx.conf``.
"""
