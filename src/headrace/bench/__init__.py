"""One benchmark, a step of a reference stack: it measures the floor beside it and checks the values that it times."""
