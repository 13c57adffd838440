"""How good is it: metrics, the protocol that applies them, and the report a person reads."""
