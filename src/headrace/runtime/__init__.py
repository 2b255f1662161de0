"""An offload in force: hooks, slots, copies ahead of use."""
