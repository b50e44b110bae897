"""Schedules that have failed once, with what was wrong; they must not fail again.

What exactly happens follows from the seed and from the code, so each is run with a few
seeds more than the one that failed.
"""

import math
from typing import Any

from tests.simulation.faults import Fault

FOUND: tuple[tuple[str, int, dict[str, Any], list[Fault]], ...] = (
    (
        "F1",
        13,
        {"slots": 2, "spares": 1, "last_step": 14, "storage_interval": 0, "skew": True},
        [
            Fault(
                who="trainer",
                what="exception-always",
                phase="replicating",
                after_s=2.0276,
                seconds=7.071,
            ),
            Fault(who="spare", what="cut", phase="end", after_s=0.0000, seconds=15.330),
            Fault(
                who="storage",
                what="full",
                phase="staging",
                after_s=2.2513,
                seconds=7.091,
            ),
        ],
    ),
    (
        "F3",
        37,
        {
            "slots": 4,
            "spares": 2,
            "last_step": 15,
            "storage_interval": 7,
            "skew": False,
        },
        [
            Fault(
                who="follower",
                what="cut-store",
                phase="exporting",
                after_s=0.0000,
                seconds=9.268,
            ),
            Fault(
                who="leader",
                what="vanish",
                phase="replicating",
                after_s=0.9974,
                seconds=1.863,
            ),
            Fault(
                who="storage",
                what="hung",
                phase="end",
                after_s=2.8165,
                seconds=math.inf,
            ),
            Fault(
                who="leader",
                what="no-processes",
                phase="replicating",
                after_s=0.0007,
                seconds=3.839,
            ),
        ],
    ),
    (
        "F5",
        159,
        {"slots": 3, "spares": 0, "last_step": 8, "storage_interval": 3, "skew": False},
        [
            Fault(
                who="follower",
                what="memory-full",
                phase="start",
                after_s=0.5761,
                seconds=1.719,
            ),
        ],
    ),
    (
        "F6",
        203,
        {
            "slots": 3,
            "spares": 0,
            "last_step": 15,
            "storage_interval": 0,
            "skew": False,
        },
        [
            Fault(
                who="follower",
                what="lie",
                phase="recovery",
                after_s=0.0020,
                seconds=3.696,
            ),
            Fault(
                who="etcd", what="slow", phase="staging", after_s=0.0000, seconds=8.916
            ),
        ],
    ),
    (
        "F7",
        224,
        {
            "slots": 3,
            "spares": 0,
            "last_step": 15,
            "storage_interval": 3,
            "skew": False,
        },
        [
            Fault(
                who="storage",
                what="hung",
                phase="committing",
                after_s=2.1573,
                seconds=5.355,
            ),
            Fault(
                who="etcd", what="older", phase="start", after_s=1.7518, seconds=9.507
            ),
            Fault(
                who="leader",
                what="stop",
                phase="exporting",
                after_s=0.0000,
                seconds=10.851,
            ),
        ],
    ),
    (
        "F4",
        395,
        {"slots": 3, "spares": 1, "last_step": 8, "storage_interval": 7, "skew": False},
        [
            Fault(
                who="leader", what="slow", phase="start", after_s=2.1155, seconds=8.264
            ),
        ],
    ),
    (
        "F7",
        846,
        {"slots": 2, "spares": 0, "last_step": 9, "storage_interval": 3, "skew": False},
        [
            Fault(
                who="etcd", what="flaky", phase="staging", after_s=0.0000, seconds=7.811
            ),
        ],
    ),
    (
        "F8",
        930,
        {
            "slots": 3,
            "spares": 1,
            "last_step": 15,
            "storage_interval": 0,
            "skew": False,
        },
        [
            Fault(
                who="leader", what="vanish", phase="at", after_s=10.2757, seconds=35.367
            ),
            Fault(
                who="trainer",
                what="exception-always",
                phase="replicating",
                after_s=0.0063,
                seconds=2.197,
            ),
        ],
    ),
    (
        "F9",
        943,
        {"slots": 3, "spares": 0, "last_step": 14, "storage_interval": 7, "skew": True},
        [
            Fault(who="etcd", what="stop", phase="at", after_s=6.4304, seconds=14.057),
            Fault(
                who="leader",
                what="cut-peers",
                phase="replicating",
                after_s=0.0000,
                seconds=9.881,
            ),
        ],
    ),
    (
        "F10",
        4161,
        {
            "slots": 3,
            "spares": 0,
            "last_step": 16,
            "storage_interval": 3,
            "skew": False,
        },
        [
            Fault(
                who="follower",
                what="memory-full",
                phase="staging",
                after_s=2.8706,
                seconds=0.432,
            ),
            Fault(who="etcd", what="flaky", phase="end", after_s=1.0047, seconds=2.014),
            Fault(
                who="etcd", what="empty", phase="start", after_s=0.1374, seconds=6.794
            ),
            Fault(
                who="etcd",
                what="older",
                phase="recovery",
                after_s=0.0091,
                seconds=1.898,
            ),
        ],
    ),
    (
        "F12",
        4554,
        {
            "slots": 3,
            "spares": 0,
            "last_step": 14,
            "storage_interval": 7,
            "skew": False,
        },
        [
            Fault(
                who="leader", what="cut-in", phase="end", after_s=0.0012, seconds=17.328
            ),
            Fault(who="etcd", what="slow", phase="at", after_s=2.3062, seconds=8.522),
            Fault(
                who="leader",
                what="cut-peers",
                phase="start",
                after_s=1.2742,
                seconds=35.570,
            ),
        ],
    ),
    (
        "F13",
        7174,
        {"slots": 3, "spares": 2, "last_step": 15, "storage_interval": 0, "skew": True},
        [
            Fault(
                who="follower",
                what="cut-one",
                phase="staging",
                after_s=0.9921,
                seconds=math.inf,
            ),
            Fault(
                who="follower",
                what="cut",
                phase="start",
                after_s=1.2547,
                seconds=14.708,
            ),
        ],
    ),
    (
        "F13",
        505744,
        {
            "slots": 3,
            "spares": 2,
            "last_step": 13,
            "storage_interval": 3,
            "skew": False,
        },
        [
            Fault(
                who="etcd",
                what="full",
                phase="committing",
                after_s=1.67127786791045,
            ),
            Fault(
                who="follower",
                what="cut-one",
                phase="at",
                after_s=5.920093554352858,
            ),
            Fault(
                who="follower",
                what="vanish",
                phase="end",
                seconds=8.258406679757957,
            ),
            Fault(
                who="leader",
                what="slow",
                phase="at",
                after_s=0.24875245291669668,
                seconds=14.51575451673691,
            ),
        ],
    ),
    (
        "F12b",
        7464,
        {
            "slots": 3,
            "spares": 0,
            "last_step": 10,
            "storage_interval": 3,
            "skew": False,
        },
        [
            Fault(
                who="leader", what="stop", phase="at", after_s=10.6951, seconds=11.064
            ),
            Fault(
                who="etcd",
                what="slow",
                phase="committing",
                after_s=0.0068,
                seconds=5.235,
            ),
            Fault(who="etcd", what="die", phase="end", after_s=0.0000, seconds=10.807),
        ],
    ),
    (
        "F14",
        3000236,
        {
            "slots": 4,
            "spares": 1,
            "last_step": 16,
            "storage_interval": 0,
            "skew": False,
        },
        [
            Fault(
                who="leader",
                what="cut",
                phase="at",
                after_s=7.665467063381923,
                seconds=4.595874066523023,
            ),
            Fault(
                who="etcd", what="stop", phase="committing", seconds=13.32181478000517
            ),
            Fault(
                who="leader",
                what="die",
                phase="at",
                after_s=1.3999069336415273,
                seconds=2.1986183344554466,
            ),
            Fault(
                who="leader",
                what="cut-in",
                phase="staging",
                after_s=0.9610091645693698,
                seconds=2.0994856180010775,
            ),
        ],
    ),
    (
        "F15",
        3003666,
        {
            "slots": 2,
            "spares": 1,
            "last_step": 11,
            "storage_interval": 0,
            "skew": False,
        },
        [
            Fault(
                who="leader",
                what="stop",
                phase="committing",
                after_s=0.25033358482930634,
                seconds=15.742110854319671,
            ),
            Fault(
                who="etcd", what="flaky", phase="exporting", seconds=2.2498052585954187
            ),
            Fault(
                who="etcd",
                what="empty",
                phase="end",
                after_s=0.01854715694126265,
                seconds=16.01063878534411,
            ),
        ],
    ),
    (
        "F16",
        4088100,
        {
            "slots": 2,
            "spares": 2,
            "last_step": 10,
            "storage_interval": 3,
            "skew": False,
        },
        [
            Fault(
                who="etcd",
                what="slow",
                phase="steady",
                after_s=0.006424662166527231,
                seconds=13.246663584780675,
            ),
            Fault(
                who="etcd",
                what="full",
                phase="replicating",
                after_s=1.910635288093129,
                seconds=math.inf,
            ),
        ],
    ),
    (
        "F17",
        5013998,
        {"slots": 3, "spares": 1, "last_step": 8, "storage_interval": 7, "skew": False},
        [
            Fault(
                who="leader",
                what="stop-host",
                phase="start",
                after_s=1.2208935006059183,
                seconds=13.021808944088269,
            ),
            Fault(
                who="leader",
                what="memory-full",
                phase="at",
                after_s=1.1146967629691344,
                seconds=15.392411986433585,
            ),
        ],
    ),
    (
        "F18",
        40004652,
        {
            "slots": 3,
            "spares": 2,
            "last_step": 10,
            "storage_interval": 3,
            "skew": False,
        },
        [
            Fault(who="etcd", what="stop", phase="end", seconds=28.61357919145787),
            Fault(
                who="follower",
                what="no-processes",
                phase="at",
                after_s=11.299519383053312,
                seconds=9.124662574442926,
            ),
            Fault(
                who="trainer",
                what="exception-always",
                phase="start",
                after_s=2.276765287367571,
            ),
            Fault(
                who="leader",
                what="lie",
                phase="end",
                after_s=0.0002539915540140525,
                seconds=9.33251105430685,
            ),
        ],
    ),
    (
        "F19",
        40074486,
        {"slots": 3, "spares": 0, "last_step": 14, "storage_interval": 3, "skew": True},
        [
            Fault(
                who="leader",
                what="memory-full",
                phase="start",
                after_s=0.9279092176116054,
                seconds=33.704897947425565,
            ),
            Fault(
                who="leader",
                what="cut-in",
                phase="at",
                after_s=5.555681985534746,
                seconds=13.248871196015305,
            ),
            Fault(
                who="trainer",
                what="exception",
                phase="end",
                after_s=0.01655039713853492,
                seconds=7.027903505223459,
            ),
        ],
    ),
    (
        "F20",
        40087036,
        {
            "slots": 3,
            "spares": 0,
            "last_step": 16,
            "storage_interval": 7,
            "skew": False,
        },
        [
            Fault(
                who="etcd",
                what="stop",
                phase="at",
                after_s=5.537719894037231,
                seconds=17.022218412656382,
            ),
            Fault(
                who="follower",
                what="cut-out",
                phase="staging",
                after_s=0.01084343718722635,
            ),
            Fault(who="leader", what="stop", phase="recovery", seconds=9.3585716721023),
        ],
    ),
    (
        "F21",
        70091421,
        {
            "slots": 2,
            "spares": 0,
            "last_step": 14,
            "storage_interval": 0,
            "skew": False,
        },
        [
            Fault(
                who="spare",
                what="die",
                phase="at",
                after_s=9.395264897106118,
                seconds=14.828271440401362,
            ),
            Fault(
                who="leader",
                what="memory-full",
                phase="recovery",
                seconds=15.28499256102003,
            ),
            Fault(
                who="leader",
                what="slow",
                phase="replicating",
                seconds=2.2369041384167168,
            ),
        ],
    ),
    (
        "F23",
        120087830,
        {
            "slots": 3,
            "spares": 1,
            "last_step": 16,
            "storage_interval": 0,
            "skew": True,
        },
        [
            Fault(
                who="leader",
                what="stop",
                phase="steady",
                after_s=0.6129370756219487,
                seconds=15.607492770089909,
            ),
            Fault(
                who="trainer",
                what="exception-always",
                phase="at",
                after_s=11.104266069702735,
                seconds=2.3350539992389905,
            ),
            Fault(
                who="spare",
                what="cut",
                phase="at",
                after_s=8.608944849915709,
                seconds=1.8030897049726833,
            ),
            Fault(
                who="etcd",
                what="stop",
                phase="exporting",
                after_s=0.2683377079058835,
                seconds=31.05066966696895,
            ),
        ],
    ),
    (
        "F24",
        140062444,
        {"slots": 2, "spares": 2, "last_step": 12, "storage_interval": 3, "skew": True},
        [
            Fault(
                who="etcd",
                what="empty",
                phase="recovery",
                after_s=0.0,
                seconds=9.102463819749966,
            ),
            Fault(
                who="follower",
                what="stop",
                phase="at",
                after_s=4.839914792338078,
                seconds=14.889245256798345,
            ),
            Fault(
                who="leader",
                what="cut-in",
                phase="start",
                after_s=1.0460457253286988,
                seconds=math.inf,
            ),
        ],
    ),
)
"""Name of the finding, seed, sizes of the job, faults."""
