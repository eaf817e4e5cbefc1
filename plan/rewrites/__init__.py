"""Rewrites: pure functions from a plan to a plan. They need no device; the reference backend runs their plans too."""
