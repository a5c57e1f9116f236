"""The master's half, in the program's own process: one call at a time, planned, sent, awaited and put together.

Knows of the workers only what messages say (``_wire``); imports nothing of theirs, and nothing of what the user holds.
``session`` is what every part is handed; ``calls`` is the path of one call, over ``state``, ``workers``, ``processes``
and ``code``; ``flight`` is above it.
"""
