"""How ranks talk to each other inside a function: collectives, messages, requests.

``comm`` is ``synk.comm``.
"""
