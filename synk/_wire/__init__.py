"""What both halves must agree on: messages, numbers and memory that they share, and how they wake one another.

Lives in both processes and decides nothing: neither half can be seen from here.
"""
