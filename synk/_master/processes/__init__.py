"""The processes of the workers, and who they are. Knows no message.

``process`` and ``worker_process`` start and end one, ``processes`` holds them all.
"""
