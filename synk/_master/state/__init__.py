"""What the workers hold for the master: functions, variables, resident objects, lanes and memory.

Each file owns one kind: what the ranks have of it, what they must be told, and what can be dropped.
"""
