"""A campaign: what to run (config), what that means (plan), running it, and what came of it.

May import every room but `cli`.
"""
