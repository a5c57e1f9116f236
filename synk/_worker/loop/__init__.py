"""A worker's life: the program, the loop, and how it handles each message.

``serve`` is the loop.
"""
