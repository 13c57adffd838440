"""Planning: which cluster trains what, for how long, on which machine."""
