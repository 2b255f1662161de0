"""A lossless code for weights that cross the link, and the kernels that decode it."""
