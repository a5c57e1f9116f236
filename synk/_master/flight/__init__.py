"""Calls and items in flight: submitted calls, streams and maps.

``queue`` orders them, ``pending`` is what a user holds of one.
"""
