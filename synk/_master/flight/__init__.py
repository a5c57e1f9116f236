"""Calls and items in flight: submitted calls, streams and maps.

``queue`` keeps them in order. ``pending`` has the future that a user holds.
"""
