"""What XLA makes of a program for GPUs that you do not have: collectives, memory, timeline; what is
wrong, and what would fix it.
"""

from sharding_rules.lab.budget import assert_budget as assert_budget
from sharding_rules.lab.budget import assert_exposed as assert_exposed
from sharding_rules.lab.compile import compile_module as compile_module
from sharding_rules.lab.compile import compile_report as compile_report
from sharding_rules.lab.diff import diff as diff
from sharding_rules.lab.lint import Finding as Finding
from sharding_rules.lab.lint import lint as lint
from sharding_rules.lab.report import LabError as LabError
from sharding_rules.lab.report import Report as Report
from sharding_rules.lab.targets import TARGETS as TARGETS
from sharding_rules.lab.targets import h100 as h100
from sharding_rules.lab.targets import lower_for as lower_for
