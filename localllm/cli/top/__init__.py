"""`localllm top`: the metrics of a running server on a terminal.

asking (GET /metrics and /slots, in a thread) -> numbers (rates, percentiles) -> screen (rich) -> command (keys, loop)
"""
