"""Decisions about replication, computed from values, without I/O and without JAX.

* `copy_placement`: assigns copies of slices to slots, and spares to lost slots, so that
  copies stay in different failure domains.
* `failure_domains`: the racks and power feeds that hosts share.
* `odds`: the probability that the state survives the loss of several hosts.
* `commit`: decides when a step is committed, and which commit can be restored.
* `restore_plan`: plans the transfers of a restore, also onto another mesh or sharding.
* `sender_assignment`: divides the bytes of these transfers over their senders.
* `snapshot_interval`: decides after which steps a snapshot is taken.

`dtft.elastic` calls these functions and carries out their decisions.
"""

from typing import TYPE_CHECKING

from dtft._lazy import attributes

if TYPE_CHECKING:
    from dtft.checkpoint.replication.commit import (
        Commit,
        CommitHealth,
        Divergence,
        Holdings,
        Located,
        MemoryCommitLog,
        Mislabelled,
        Share,
        StepTracker,
        adding_up,
        check_copy,
        commit_health,
        locate,
        worth_showing,
    )
    from dtft.checkpoint.replication.copy_placement import (
        CopyPlacement,
        Push,
        Shares,
        Spread,
        choose_spares,
        copy_groups,
        domains_reached,
        place_copies,
    )
    from dtft.checkpoint.replication.failure_domains import (
        FailureDomains,
        domains_at,
        domains_from_labels,
        parse_domain_file,
        parse_domain_label,
        separate_copies,
    )
    from dtft.checkpoint.replication.odds import odds_table
    from dtft.checkpoint.replication.restore_plan import (
        HeldLeaves,
        Inventory,
        Lost,
        RestorePlan,
        SliceTransfer,
        inventory_of,
        new_specs,
        plan_restore,
    )
    from dtft.checkpoint.replication.snapshot_interval import (
        LEAST_MAXIMUM,
        Automatic,
        Cadence,
        Costs,
        Experience,
        SnapshotSchedule,
        Window,
        inflation,
        next_interval,
    )

_PUBLIC = {
    "Automatic": "snapshot_interval",
    "Cadence": "snapshot_interval",
    "Commit": "commit",
    "CommitHealth": "commit",
    "CopyPlacement": "copy_placement",
    "Costs": "snapshot_interval",
    "Divergence": "commit",
    "Experience": "snapshot_interval",
    "FailureDomains": "failure_domains",
    "HeldLeaves": "restore_plan",
    "Holdings": "commit",
    "Inventory": "restore_plan",
    "LEAST_MAXIMUM": "snapshot_interval",
    "Located": "commit",
    "Lost": "restore_plan",
    "MemoryCommitLog": "commit",
    "Mislabelled": "commit",
    "Push": "copy_placement",
    "RestorePlan": "restore_plan",
    "Share": "commit",
    "Shares": "copy_placement",
    "SliceTransfer": "restore_plan",
    "SnapshotSchedule": "snapshot_interval",
    "Spread": "copy_placement",
    "StepTracker": "commit",
    "Window": "snapshot_interval",
    "adding_up": "commit",
    "check_copy": "commit",
    "choose_spares": "copy_placement",
    "commit_health": "commit",
    "copy_groups": "copy_placement",
    "domains_at": "failure_domains",
    "domains_from_labels": "failure_domains",
    "domains_reached": "copy_placement",
    "inflation": "snapshot_interval",
    "inventory_of": "restore_plan",
    "locate": "commit",
    "new_specs": "restore_plan",
    "next_interval": "snapshot_interval",
    "odds_table": "odds",
    "parse_domain_file": "failure_domains",
    "parse_domain_label": "failure_domains",
    "place_copies": "copy_placement",
    "plan_restore": "restore_plan",
    "separate_copies": "failure_domains",
    "worth_showing": "commit",
}

__all__ = [
    "Automatic",
    "Cadence",
    "Commit",
    "CommitHealth",
    "CopyPlacement",
    "Costs",
    "Divergence",
    "Experience",
    "FailureDomains",
    "HeldLeaves",
    "Holdings",
    "Inventory",
    "LEAST_MAXIMUM",
    "Located",
    "Lost",
    "MemoryCommitLog",
    "Mislabelled",
    "Push",
    "RestorePlan",
    "Share",
    "Shares",
    "SliceTransfer",
    "SnapshotSchedule",
    "Spread",
    "StepTracker",
    "Window",
    "adding_up",
    "check_copy",
    "choose_spares",
    "commit_health",
    "copy_groups",
    "domains_at",
    "domains_from_labels",
    "domains_reached",
    "inflation",
    "inventory_of",
    "locate",
    "new_specs",
    "next_interval",
    "odds_table",
    "parse_domain_file",
    "parse_domain_label",
    "place_copies",
    "plan_restore",
    "separate_copies",
    "worth_showing",
]

__getattr__, __dir__ = attributes(__name__, _PUBLIC)
