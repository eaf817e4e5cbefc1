"""Emitters: functions that turn an operation of a plan into launches, by subject. `gpu.lower` has the table."""
