"""Planning: which cluster trains what, for how long, on which machine."""

from .islands import Island, read_islands
from .recipes import PlanConfig, recipe, recipe_for
from .stage import plan

__all__ = ["Island", "PlanConfig", "plan", "read_islands", "recipe", "recipe_for"]
