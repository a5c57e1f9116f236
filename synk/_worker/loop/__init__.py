"""A worker's life: the program, the loop, and what it does about each message.

``serve`` is the loop.
"""
