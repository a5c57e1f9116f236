"""The processes of the workers: who they are, how they start and end, what they must know. Sends no message.

``process`` and ``worker_process`` start and end one process, ``processes`` holds all of them, and ``log`` knows what
each rank has yet to learn.
"""
