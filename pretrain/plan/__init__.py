"""Arithmetic before a run: parameters, FLOPs, energy, memory and time of a layout, in closed form."""
