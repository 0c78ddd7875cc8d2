"""Engines: a scripted one for tests, transformers in this process."""
