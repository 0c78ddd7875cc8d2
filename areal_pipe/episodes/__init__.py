"""Running one episode and closing one group: stages, packing, seeds, what users' names resolve to.

May import `contract`.
"""
