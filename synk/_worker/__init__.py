"""The workers' half: a process for each device that receives messages, runs the user's function and replies.

A worker knows of the master only what messages say (``_wire``), and imports nothing from its half. ``loop`` is the life
of the process, ``rank`` what its parts are handed, ``call`` one call, ``comm`` how ranks talk to each other, and
``held`` what a worker keeps.
"""
