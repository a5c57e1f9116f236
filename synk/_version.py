"""The version, where a worker finds it without importing the package's public names."""

__version__ = "0.2.0"
