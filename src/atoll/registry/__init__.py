"""Versions of a run's model: created and never overwritten; what each consists of, how it changes, how far it is."""
