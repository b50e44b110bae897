# `make demo` and `make test` are the only set-up: each makes .venv when needed.

PYTHON ?= python3
STAMP := .venv/.dtft-stamp
AOT_STAMP := .venv/aot/.dtft-stamp

# Bytecode is kept: a drill starts dozens of processes, each of which would compile dtft.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test drills wheel-test test-newest simulation lint bench nixl clean

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	.venv/bin/pip install -q -c constraints.txt -e '.[images,test,lint]'
	touch $@

# XLA's GPU compiler (130 MB), for the tests only; apart, see the extra `aot`. Where
# there is no wheel of it, those tests are skipped and say so.
$(AOT_STAMP): $(STAMP)
	rm -rf .venv/aot
	.venv/bin/pip install -q -c constraints.txt --no-deps --target .venv/aot \
		jax-cuda13-plugin jax-cuda13-pjrt || test "$$(uname -sm)" != "Linux x86_64"
	mkdir -p .venv/aot
	touch $@

# Kills host 1 after step 150 and compares with an undisturbed run.
demo: $(STAMP)
	.venv/bin/dtft drill digits_cnn --hosts 3 --spares 1 --fault kill-host:1@150 \
		--run-dir runs/demo --json runs/demo/drill.json

# One of its drills compiles as users do, as all of `make drills`; the other tests fast.
# Two drills run at a time: each waits for most of its time. Sets keep their order, so
# that a simulated schedule is that of its seed.
test: $(STAMP) $(AOT_STAMP)
	PYTHONHASHSEED=0 \
		.venv/bin/pytest -q -m "not drill and not more" -n auto --dist worksteal
	JAX_DISABLE_MOST_OPTIMIZATIONS=1 \
		.venv/bin/pytest -q -n 2 --dist worksteal -m "drill and not drill_all" tests/drills

drills: $(STAMP) $(AOT_STAMP)
	.venv/bin/pytest -q -m drill_all tests/drills
	.venv/bin/pytest -q -m more tests

# What a user does who installs the wheel, in an empty environment of each Python.
wheel-test: $(STAMP)
	.venv/bin/python -m tests.wheel

# Unit tests and a drill with newer packages than those of constraints.txt.
test-newest: $(STAMP)
	.venv/bin/python -m tests.newest

# The control plane in virtual time: every kind of fault, then random schedules.
simulation: $(STAMP)
	.venv/bin/python -m tests.simulation --matrix --jobs 2
	.venv/bin/python -m tests.simulation --random 100000 --jobs 2

lint: $(STAMP)
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/basedpyright
	.venv/bin/lint-imports

bench: $(STAMP)
	.venv/bin/dtft bench digits_cnn
	.venv/bin/python benchmarks/optimizer_step.py
	.venv/bin/python benchmarks/packed_all_reduce.py
	.venv/bin/python benchmarks/cholesky_wire.py
	.venv/bin/python benchmarks/restore_plan.py
	.venv/bin/python benchmarks/planning.py
	.venv/bin/dtft bench transport
	.venv/bin/python benchmarks/loop_overhead.py

# Optional: fetches over RDMA. NIXL declares torch and runs without it.
nixl: $(STAMP)
	.venv/bin/pip install -q -c constraints.txt --no-deps nixl nixl-cu12

clean:
	rm -rf .venv runs dist build .pytest_cache .ruff_cache .hypothesis
	rm -rf .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
