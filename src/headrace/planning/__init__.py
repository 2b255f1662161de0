"""From a request to a plan for this machine: the device, the planner, and whether it has room."""
