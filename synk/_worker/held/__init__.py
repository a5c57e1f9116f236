"""What a worker keeps from call to call: functions, plans, variables, resident objects, memory.

Knows no communication between ranks.
"""
