"""Processes that share the bytes of a model."""
