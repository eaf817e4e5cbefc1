"""Rewrites: pure functions from plans to plans. They run without a device, and the reference backend also runs
rewritten plans.
"""
