"""Rewrites: pure functions from plans to plans. Tests check them without a device."""
