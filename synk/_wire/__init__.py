"""What both halves must agree on: messages, shared numbers, shared memory, and how they wake each other.

It lives in both processes and decides nothing. It imports neither half.
"""
