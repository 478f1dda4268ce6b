"""Continuous batching: requests in, step plans out."""

from scheduler.config import SchedulerConfig
from scheduler.features import StepFeatures
from scheduler.plan import Finished, Preemption, StepOutcome, StepPlan, StepResult, Stop
from scheduler.policies import POLICIES, Policy, load_policy
from scheduler.request import Request
from scheduler.scheduler import RequestRefusedError, Scheduler
from scheduler.sequence import Sequence, SequenceArrays

__all__ = [
    "POLICIES",
    "Finished",
    "Policy",
    "Preemption",
    "Request",
    "RequestRefusedError",
    "Scheduler",
    "SchedulerConfig",
    "Sequence",
    "SequenceArrays",
    "StepFeatures",
    "StepOutcome",
    "StepPlan",
    "StepResult",
    "Stop",
    "load_policy",
]
