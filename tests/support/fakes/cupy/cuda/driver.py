"""Errors of the stand-in's driver."""

from __future__ import annotations


class CUDADriverError(RuntimeError):
    pass
