"""Scoring over HTTP: ``python -m inference serve``.

:mod:`.app` reads a request and encodes its rows, :mod:`.batching` scores the rows of waiting
requests together, :mod:`.reload` follows the bundle, :mod:`.processes` starts to serve, and
:mod:`.forked_workers` does so in several processes. A process has one event loop, which also scores
small requests of quick models, one thread for the model and two for parsing large requests. What a
proxy does (keys, TLS, limits of each client) is in ``deploy/nginx.conf``.
"""
