"""From files and live tensors into stores and onto the device, in one pass."""
