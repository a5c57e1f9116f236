"""What ranks say to each other inside a function: collectives, messages, requests.

``comm`` is ``synk.comm``.
"""
