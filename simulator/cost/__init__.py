"""Cost models: how long a step takes."""

from simulator.cost.factors import Factors, factors_for
from simulator.cost.models import ConstantCost, LinearCost, cost_model_from_flag
from simulator.cost.no_cache import NoCacheCost
from simulator.cost.physical import PhysicalCost
from simulator.cost.profile import ProfileCost
from simulator.cost.step import CostModel, RunPrice, StepPrice

__all__ = [
    "ConstantCost",
    "CostModel",
    "Factors",
    "LinearCost",
    "NoCacheCost",
    "PhysicalCost",
    "ProfileCost",
    "RunPrice",
    "StepPrice",
    "cost_model_from_flag",
    "factors_for",
]
