"""Where offloaded weights are stored: opened, filled and read."""
