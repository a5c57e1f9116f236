"""The workers' half: a process for each device that receives messages, runs the user's function and answers.

Knows of the master only what messages say (``_wire``); imports nothing of the master's. ``serve`` is the loop of the
process, ``rank`` what it does for each message, ``execute`` one call.
"""
