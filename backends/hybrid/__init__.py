"""Two backends as one: some layers of a plan run on a graphics card, the others on the CPU."""
