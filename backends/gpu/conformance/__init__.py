"""The check of a device before a model uses it: every operation of the model's plan, compared with the reference.

`segments` cuts a plan into small plans with the model's own kernels, `samples` makes their weights and inputs,
`running` compares a device with the NumPy reference, and `verdicts` stores the results and decides.
"""
