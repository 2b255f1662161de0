"""Stores of offloaded weights: opened, filled and read."""
