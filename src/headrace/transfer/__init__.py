"""Copies from a store to the device, and the probe that measures their rates."""
