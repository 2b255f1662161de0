"""Host memory: pinned, shared, mapped; what the system has."""
