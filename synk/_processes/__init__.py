"""Who the workers are: where they run, how they start, what they print, how they end.

Nothing here knows of functions, plans or calls.
"""
