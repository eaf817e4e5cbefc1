"""Plots of speed: results of `localllm bench` as a roofline, curves and a table, drawn by matplotlib."""
