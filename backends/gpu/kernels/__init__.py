"""The kernels: their sources (*.cl), and their declarations in Python by subject. `kernel.py` explains declarations."""
