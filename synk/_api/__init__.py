"""What the user holds, in the master's process: functions, data, variables, runtimes, and the verbs on them.

Checks what a user passes, says what went wrong in the user's words, and leaves the work to ``_master``. May import
everything of the master; of the workers only ``inline`` knows, which plays one.
"""
