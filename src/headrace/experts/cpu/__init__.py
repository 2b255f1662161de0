"""Experts of few rows on a CPU with the bits of a GPU: kernels and threads in C, and what calls them."""
