"""Messages to the workers: sending, waiting for replies, deaths, replacements.

The rest of the master talks to ``workers``.
"""
