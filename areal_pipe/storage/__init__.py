"""Trajectories at rest: where they lie, how they are written whole, and how they are read."""
