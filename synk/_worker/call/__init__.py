"""One call on a worker: its inputs, the function, its outputs.

``execute`` is the path of it.
"""
