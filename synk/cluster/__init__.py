"""Runtimes over several nodes. Each node is an agent with an ordinary session of its own; the program is the head.

``split`` is pure, and ``orders`` holds the messages. ``loop``, ``agent``, ``items`` and ``relayed`` run on the nodes,
``forking``, ``head``, ``ranks``, ``wire_group`` and ``agent_process`` in the program. ``ray`` and ``ray_machines``
serve nodes on other machines.
"""
