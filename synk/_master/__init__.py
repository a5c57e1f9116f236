"""The master's half, in the program's own process. A call is planned, sent and awaited here, and its result built.

It knows of the workers only what messages say (``_wire``), and imports neither their half nor ``_api``. ``session`` is
handed to every part. ``calls`` is the path of one call, built on ``state``, ``workers``, ``processes`` and ``code``.
``flight`` keeps the calls in flight and stands above it.
"""
