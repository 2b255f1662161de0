"""CUDA graphs that headrace captures itself: the decoding step of transformers' ``generate``."""
