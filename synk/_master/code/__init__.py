"""Captured objects and how they travel: which of them the ranks hold, and how each has changed since.

This folder knows no runtime and sends nothing. ``facets`` compares one object, ``arrays`` the bytes of arrays,
``packing`` pickles, ``book`` records what the ranks of one runtime hold, ``modules`` finds the user's modules, and
``capture`` tells before each call whether anything that a function captured has changed.
"""
