"""What the user holds, in the master's process: functions, data, variables, runtimes, and the verbs on them.

It checks what a user passes, words errors for the user, and leaves the work to ``_master``, which it may import as a
whole. Only ``inline``, which plays a rank, knows anything of the workers.
"""
