"""Runtimes over several nodes. Each node is an agent with an ordinary session of its own; the program is the head.

``split`` and ``orders`` are pure or nearly so. ``loop``, ``agent``, ``items`` and ``relayed`` run on the nodes,
``head``, ``ranks``, ``wire_group`` and ``agent_process`` in the program. ``ray``, ``ray_machines`` and ``link`` serve
nodes on other machines.
"""
