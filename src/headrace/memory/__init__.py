"""Host memory (pinned, shared, mapped), device memory that ranks share, and what the system has."""
