"""What knows no process, no memory that is shared and no message: shards, ops, trees, arrays, limits, signals.

The same in every process; pure functions as far as Python allows.
"""
