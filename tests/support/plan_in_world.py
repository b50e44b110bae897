"""One of several gloo processes that plan together: RANK NUM_PROCESSES ADDRESS."""

import math
import sys

import dtft
from experiments import worlds
from tests.support.zoo import MODELS


def main(rank: int, num: int, address: str) -> None:
    """Answers with the devices of two plans: for this job, and for a like cluster."""
    worlds.join(rank, num, address)
    model = MODELS["mlp"](batch=512, widths=(1024, 4096, 256))
    used = []
    for cluster in (None, f"{num + 2}xcpu"):
        plan = dtft.plan(
            loss=model.loss,
            optimizer=model.optimizer,
            params=model.params,
            batch=model.batch,
            cluster=cluster,
        )
        used.append(math.prod(plan.mesh.values()))
    worlds.answer(used)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
