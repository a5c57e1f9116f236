"""The workers' half: a process for each device that receives messages, runs the user's function and answers.

Knows of the master only what messages say (``_wire``); imports nothing of the master's. ``loop`` is the life of the
process, ``rank`` what its parts are handed, ``call`` one call, ``comm`` ranks that talk, ``held`` what it keeps.
"""
