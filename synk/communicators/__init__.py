"""Collectives and messages between the workers, on NumPy arrays in host memory, and ``synk.comm``, which is ``_comm``.

``_shm`` is for the ranks of a machine, ``_two_level`` for those of several nodes. Between GPUs, see ``synk.cuda``.
"""
