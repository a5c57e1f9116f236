"""Messages to the workers: sending, waiting for replies, deaths, starting again.

``workers`` is what the rest of the master speaks to.
"""
