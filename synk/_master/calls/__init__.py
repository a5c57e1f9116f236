"""One call, from the arguments to the result.

``call`` is the path: for a new call, and for a call that fits a ``compiled`` one.
"""
