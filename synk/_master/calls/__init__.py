"""One call, from the arguments to the result.

``call`` is its way: for a new one, and for one that fits a ``compiled`` one.
"""
