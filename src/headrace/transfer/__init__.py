"""Copies from a store to the device."""
