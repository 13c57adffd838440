"""The whole pipeline on one machine: what it will do, written down once, and done by the stages' own functions."""
