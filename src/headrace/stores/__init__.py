"""Where the bytes of offloaded weights rest."""
