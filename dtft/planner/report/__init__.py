"""Reports of a plan: explanation, comparison with other plans, lints, and HTML.

* `text`: `explain`, the plan as text.
* `compare`: two plans side by side, and the reasons for their difference in time.
* `replan`: what other settings would cost (`why_not`), and the seconds that each pin (a
  setting that the user has fixed) costs.
* `lints`: small changes of the model or batch that would save time or memory.
* `hardware_sensitivity`: the best plans on changed clusters, such as faster links.
* `logical_axes`: a plan as Flax's logical axis rules.
* `html_report`, `page`: the report as an HTML file without network or scripts.
"""

from typing import TYPE_CHECKING

from dtft._lazy import attributes

if TYPE_CHECKING:
    from dtft.planner.report.compare import diff
    from dtft.planner.report.hardware_sensitivity import sensitivity
    from dtft.planner.report.html_report import (
        COLORS,
        legend,
        lint_section,
        report_html,
        report_text,
    )
    from dtft.planner.report.lints import Lint, find_lints
    from dtft.planner.report.logical_axes import AxisRules, axis_rules
    from dtft.planner.report.page import block_html, page_html, section_html
    from dtft.planner.report.replan import pin_section, why_not
    from dtft.planner.report.text import knobs_text, plan_sections, step_text

_PUBLIC = {
    "AxisRules": "logical_axes",
    "COLORS": "html_report",
    "Lint": "lints",
    "axis_rules": "logical_axes",
    "block_html": "page",
    "diff": "compare",
    "find_lints": "lints",
    "knobs_text": "text",
    "legend": "html_report",
    "lint_section": "html_report",
    "page_html": "page",
    "pin_section": "replan",
    "plan_sections": "text",
    "report_html": "html_report",
    "report_text": "html_report",
    "section_html": "page",
    "sensitivity": "hardware_sensitivity",
    "step_text": "text",
    "why_not": "replan",
}

__all__ = [
    "AxisRules",
    "COLORS",
    "Lint",
    "axis_rules",
    "block_html",
    "diff",
    "find_lints",
    "knobs_text",
    "legend",
    "lint_section",
    "page_html",
    "pin_section",
    "plan_sections",
    "report_html",
    "report_text",
    "section_html",
    "sensitivity",
    "step_text",
    "why_not",
]

__getattr__, __dir__ = attributes(__name__, _PUBLIC)
