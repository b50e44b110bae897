"""The fields of the messages between hosts, and checks of these fields.

* `reports`: messages from a host to its leader; `orders`: from a leader to a host.
* `fields`: checks of single fields, used by `reports` and `orders`.

Handlers are in `host` (orders) and `leader` (reports); connections are in
`dtft.elastic.links` and `dtft.elastic.network`.
"""

from typing import TYPE_CHECKING

from dtft._lazy import attributes

if TYPE_CHECKING:
    from dtft.elastic.messages.fields import Check, known_commit, known_layout
    from dtft.elastic.messages.orders import fault_of_order, order_fields
    from dtft.elastic.messages.reports import (
        REPORT_FIELDS,
        SERVED_FIELDS,
        fault_of_report,
        misfit,
        report_fields,
    )

_PUBLIC = {
    "Check": "fields",
    "REPORT_FIELDS": "reports",
    "SERVED_FIELDS": "reports",
    "fault_of_order": "orders",
    "fault_of_report": "reports",
    "known_commit": "fields",
    "known_layout": "fields",
    "misfit": "reports",
    "order_fields": "orders",
    "report_fields": "reports",
}

__all__ = [
    "Check",
    "REPORT_FIELDS",
    "SERVED_FIELDS",
    "fault_of_order",
    "fault_of_report",
    "known_commit",
    "known_layout",
    "misfit",
    "order_fields",
    "report_fields",
]

__getattr__, __dir__ = attributes(__name__, _PUBLIC)
