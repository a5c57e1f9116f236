"""The workers' state as the master knows it: functions, variables, resident objects, lanes and memory.

Each file owns one kind: what the ranks hold of it, what they must be told, and what can be dropped.
"""
