"""Fusion analysis: which neighbouring operators run as one kernel, and why the others do not.

In the order in which data flows: `operator_class` says what kind of loop an operator is, `flow` who reads whose
results, `rules` which pairs of neighbours may fuse. `registered` and `generated` find groups that the device has a
kernel for, or can make one for, and `groups` keeps them in an order in which they can run; `traffic` and `resources`
are what they weigh. `checker` puts it together.
"""

from kagent_core.extract.fusion.checker import FusionChecker
from kagent_core.extract.fusion.flow import neighbours
from kagent_core.extract.fusion.operator_class import Loops, OperatorClass, class_of, loops_of

__all__ = ["FusionChecker", "Loops", "OperatorClass", "class_of", "loops_of", "neighbours"]
