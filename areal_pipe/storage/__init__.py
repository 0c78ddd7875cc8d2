"""Trajectories at rest: where they lie, how they are written whole, and how they are read.

May import `contract`. All that spells a key or a column is here.
"""
