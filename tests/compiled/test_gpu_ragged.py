"""XLA's GPU compiler multiplies out ragged matmuls, and divides no rows or groups."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from dtft.planner.aot.hlo import parse
from tests.support import gpu_compiler, hlo

ROWS, WIDTH, HIDDEN, GROUPS = 2048, 64, 128, 8


def compiled(rows: PartitionSpec, matrices: PartitionSpec) -> jax.stages.Compiled:
    mesh = gpu_compiler.mesh(expert=GROUPS)

    def shape(*sizes: int, spec: PartitionSpec, dtype: str) -> jax.ShapeDtypeStruct:
        where = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(sizes, jnp.dtype(dtype), sharding=where)

    return (
        jax.jit(jax.lax.ragged_dot)
        .lower(
            shape(ROWS, WIDTH, spec=rows, dtype="float32"),
            shape(GROUPS, WIDTH, HIDDEN, spec=matrices, dtype="float32"),
            shape(GROUPS, spec=PartitionSpec(), dtype="int32"),
        )
        .compile()
    )


@pytest.mark.parametrize(
    ("rows", "matrices", "gathered"),
    [
        (PartitionSpec(), PartitionSpec("expert"), GROUPS * WIDTH * HIDDEN),
        (PartitionSpec("expert"), PartitionSpec(), ROWS * WIDTH),
    ],
)
def test_rows_and_groups_are_gathered_and_multiplied_out(
    rows: PartitionSpec, matrices: PartitionSpec, gathered: int
) -> None:
    program = compiled(rows, matrices)
    found = parse(program.as_text())
    sizes = [
        hlo.largest(one)
        for one in found.operations
        if one.opcode in ("all-gather", "all-gather-start")
    ]
    assert sizes == [gathered]
    memory = program.memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes >= GROUPS * ROWS * WIDTH * 4
