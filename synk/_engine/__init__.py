"""The program's half of a runtime: one way of a call, and what the user holds between calls.

Read a call in this order: ``function``, ``arguments``, ``plan``, ``engine``, then ``call`` and ``outputs`` of
``synk._rank``, and ``outputs`` here. docs/design.md has the protocol, the life of a call, recovery, and who writes what
when. Nothing here is imported by a worker.
"""
