"""Kinds of store beside host memory, one file each: what plans, limits and tables ask of them."""
