"""The kernels: sources (*.cl), and their declarations in Python by subject. `kernel.py` explains declarations."""
