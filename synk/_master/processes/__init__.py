"""The processes of the workers, who they are, and what they have to know. Sends no message.

``process`` and ``worker_process`` start and end one, ``processes`` holds them all; ``log`` says what is new to which.
"""
