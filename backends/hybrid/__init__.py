"""A backend made of two: some layers of a plan run on a GPU, the others on the CPU."""
