"""The user's objects in the program: functions, saved programs, runtimes, executors, and the verbs on them.

It checks the user's arguments, words errors for the user, and leaves the work to ``_engine``, which it may import as a
whole.
"""
