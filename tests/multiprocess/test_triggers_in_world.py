"""Four processes over gloo, one of them late: who waits where, with each trigger.

The late process waits for files of the others, not for a time (see
`experiments/triggers_worker.py`), so the load of the machine changes no order.
"""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import triggers
from experiments.triggers_worker import L, data, loss


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_one_late_process(tmp_path: Path) -> None:
    worlds, gradients = triggers.record(delay_s=0.3, deadline_s=150)
    table = tmp_path / "who_waits_where.json"
    rows = [
        dict(zip(triggers.HEADER, r, strict=True)) for r in triggers.rows_of(worlds)
    ]
    table.write_text(json.dumps({"rows": rows, "events": worlds}, indent=1))
    print(table.read_text())

    fast, late = worlds[:-1], worlds[-1]
    for trigger in ("host", "device", "layer"):
        ready = late[trigger]["ready 0"]
        for events in fast:
            own = events[trigger]
            assert own["ready 0"] < ready, "does not wait to compute its own"
            assert own["done"] > ready, "no mean without the late process"
    for events in worlds:
        # No host commands, and so no device enters the reduction, before all are done.
        assert events["host"]["commanded"] > late["host"]["ready 0"]
        assert not any(name.startswith("reduced") for name in events["device"])
        for layer in range(1, L):
            # These layers need nothing of the late gradient, and do not wait for it.
            assert events["layer"][f"reduced {layer}"] < late["layer"]["ready 0"]
        assert events["layer"]["reduced 0"] > late["layer"]["ready 0"]

    w_LDD, batch = data()
    expected = jax.grad(loss)(jnp.asarray(w_LDD), jax.tree.map(jnp.asarray, batch))
    for answer in gradients:
        assert answer == gradients[0], "replicas differ"
        # Between triggers only within rounding: over gloo the last bits differ.
        for trigger in ("host", "device", "layer"):
            np.testing.assert_allclose(answer[trigger], expected, rtol=2e-5, atol=1e-7)
