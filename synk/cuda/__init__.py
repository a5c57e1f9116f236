"""All that needs CUDA: CuPy, page-locked memory, NVML, NCCL. Programs on the CPU never import it.

The protocols that it implements are those of ``synk.backends`` and ``synk.communicators``.
"""
