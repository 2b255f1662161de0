"""A cache of experts in device memory: the mechanism ``cache``."""
