"""Code that knows no process, no shared memory and no message: shards, ops, trees, arrays, limits, signals.

It does the same in every process. Its functions are pure as far as Python allows.
"""
