"""Engines: a scripted one for tests, transformers in this process.

May import `rollout`, whose `RolloutEngine` they extend, and what lies below it.
"""
