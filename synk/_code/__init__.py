"""Captured objects, in the program: what a function refers to, what of it has changed, and how that is packed.

``book`` has what was sent, ``capture`` what one function captured, ``facets`` the ways in which an object can change.
"""
