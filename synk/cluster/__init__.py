"""Runtimes over several nodes. Each node is an agent with an ordinary session of its own; the program is the head.

``split``, ``orders``, ``outputs`` are pure or nearly so. ``loop``, ``agent`` and ``items`` run on the nodes, ``head``
and ``ranks`` in the program, and ``here`` starts agents as child processes of it.
"""
