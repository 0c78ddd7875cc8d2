"""Reward functions, and the pool of killable processes that runs them.

May import `contract`.
"""
