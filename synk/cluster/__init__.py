"""Runtimes over several nodes. Each node is an agent with an ordinary session of its own; the program is the head.

``split``, ``orders``, ``outputs`` are pure or nearly so. ``loop`` and ``agent`` run on the nodes, ``head`` in the
program, and ``here`` starts agents as child processes of it.
"""
