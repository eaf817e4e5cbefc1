"""Two backends as one: some of a plan's layers on a graphics card, the rest on the CPU."""
