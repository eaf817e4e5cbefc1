"""Rewrites: pure functions from plans to plans. They need no device; the reference backend runs their results too."""
