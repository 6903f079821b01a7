"""Training through Lightning: exact to resume, the same on one process and on several."""
