"""Planning: which cluster trains what, for how long, on which machine."""

from .recipes import PlanConfig, recipe, recipe_for
from .stage import plan

__all__ = ["PlanConfig", "plan", "recipe", "recipe_for"]
