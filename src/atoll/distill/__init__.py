"""One dense network out of an ensemble: a student learns what the experts answer."""
