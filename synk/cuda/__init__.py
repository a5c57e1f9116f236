"""Everything that needs CUDA: CuPy, page-locked memory, devices, NCCL. Programs on the CPU never import it.

It implements the protocols of ``synk.backends`` and ``synk.communicators``.
"""
