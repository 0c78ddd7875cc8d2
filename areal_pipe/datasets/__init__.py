"""Prompts in, batches out: loading datasets, collating trajectories, advantages.

May import `storage`, `episodes` and `contract`.
"""
