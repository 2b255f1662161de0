"""A server of transformers models in one process: what it accepts, what it runs together, and the HTTP around it."""
