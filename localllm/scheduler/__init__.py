"""Continuous batching of many requests on one engine, with a prefix cache, preemption and speculation.

The tokens of a request do not depend on the other requests in the batch.
"""
