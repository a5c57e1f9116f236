"""One call on a worker: its inputs, the function, its outputs.

``execute`` is its path.
"""
