"""The path from store to device: worker threads on a CPU, streams on a GPU."""
