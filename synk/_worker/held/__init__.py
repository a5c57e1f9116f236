"""Everything that a worker keeps from call to call: functions, plans, variables, resident objects, memory.

It knows no communication between ranks.
"""
