"""Workflows ready to use: one-turn RLVR and multi-turn retry.

May import `rewards`, `episodes` and `contract`.
"""
