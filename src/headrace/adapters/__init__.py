"""Engines that headrace works inside, one file each; nothing here is imported before it is asked for."""
