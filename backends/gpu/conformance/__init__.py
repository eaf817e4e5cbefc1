"""The conformance check of a device before a model uses it: every operation of the plan is compared with the reference.

`segments` cuts a plan into small plans with the model's own kernels. `samples` generates their weights and inputs.
`running` compares a device with the NumPy reference (`reference`), within `tolerances`, and leaves patterns in its
memory (`residue`). `verdicts` stores the results and decides.
"""
