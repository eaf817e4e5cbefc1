"""The GPU kernels: sources (*.cl), and Python modules that declare them by subject.

`kernel.py` explains declarations; `signatures.py` reads the buffers from the sources.
"""
