"""A rank's half of a runtime: what a worker holds, and how it answers the orders of the program.

``loop`` is the life of its process, ``rank`` what it holds, ``call`` one call, ``outputs`` what becomes of the result.
``device`` is imported only where there is one. Nothing here is imported by the program, but for ``num_workers=0``.
"""
