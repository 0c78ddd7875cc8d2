"""Rollouts without Prefect: submit, wait, rollout_batch and prepare_batch under a staleness bound.

May import `storage` (the executor's dump), `episodes` and `contract`. Engines are built on it.
"""
