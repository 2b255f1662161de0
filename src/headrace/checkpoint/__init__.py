"""Weights in files."""
