"""Prefect tasks: thin wrappers around the library, with their policies decided in one place."""
