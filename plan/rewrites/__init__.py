"""Rewrites: pure functions from plans to plans. They need no device, and the reference backend runs rewritten plans
too.
"""
