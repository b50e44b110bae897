"""Moves the tests to tests/{unit,compiled,multiprocess,drills,support} (issue 19).

    python tools/house/move_tests.py [--check]

Run it once, in a checkout without changes, and commit what it leaves in the index. A
file under tests/ that the table does not name ends it before anything is moved; so do
names that would meet in one folder. `--check` ends there. What the table names and is
not there (any more, or yet) is only told. After the move it names what still speaks of
the old places.

The rule of the table: `unit/<package of dtft>` has what runs in pytest's own process,
servers on threads included; `multiprocess` has files whose tests mostly start other
processes; `compiled` has files that mostly read what XLA made of a program; `support`
has modules that are no tests and that tests of several folders use.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
STAYS = ("tests/simulation/", "tests/wheel/", "tests/newest.py", "tests/conftest.py")
"""Promised commands, and what holds for all tests. Drills stay but for the harness."""
GONE = ("tests/train/__init__.py",)
"""Empty, and without a reader: no other folder of tests has one."""
TABLE: dict[str, str] = {
    # Folder to the files that go there, without tests/ and .py; OLD=NEW gives a name.
    "unit": "test_former test_maps test_public_names test_readme",
    "unit/balance": """
        planner/test_balance planner/test_load_shares planner/test_placement_work
        planner/test_tried""",
    "unit/calibration": "train/test_calibrate",
    "unit/checkpoint": """
        checkpoint/test_aligned_allocator checkpoint/test_verification
        checkpoint/test_apart checkpoint/test_arena checkpoint/test_arena_map
        checkpoint/test_board checkpoint/test_bounded checkpoint/test_compare
        checkpoint/test_dialing checkpoint/test_digest checkpoint/test_domains
        checkpoint/test_fetch checkpoint/test_fingerprint
        checkpoint/test_former_format checkpoint/data/steps_of_3d5ab71.tar.xz
        checkpoint/test_frozen_leaves checkpoint/test_health checkpoint/test_holder
        checkpoint/test_host_bytes checkpoint/test_integrity checkpoint/test_interval
        checkpoint/test_job_layout checkpoint/test_job_shardings
        checkpoint/test_job_steps checkpoint/test_leaves checkpoint/test_link
        checkpoint/test_odds checkpoint/test_opened checkpoint/test_options
        checkpoint/test_orbax_defects checkpoint/test_outbound checkpoint/test_pace
        checkpoint/test_placement checkpoint/test_pool checkpoint/test_pushing
        checkpoint/test_regions checkpoint/test_restore checkpoint/test_restore_cases
        checkpoint/test_save_clock checkpoint/test_scrub checkpoint/test_seal
        checkpoint/test_shares checkpoint/test_slabs checkpoint/test_slices
        checkpoint/test_snapshot checkpoint/test_storage checkpoint/test_storage_steps
        checkpoint/test_stream checkpoint/test_timeouts checkpoint/test_transport
        checkpoint/test_tree checkpoint/test_unchanged checkpoint/test_wire
        checkpoint/test_wire_fuzz""",
    "unit/cli": "test_cli train/test_checkpoint_commands train/test_plan_command",
    "unit/collectives": """
        collectives/test_all_reduce collectives/test_bands collectives/test_gradients
        collectives/test_symmetric""",
    "unit/config": """
        train/test_config train/test_disk train/test_pipeline_config
        train/golden/chars_transformer.json train/golden/digits_cnn.json
        train/golden/digits_shampoo.json train/golden/resnet50_imagenet.json
        train/golden/resnet50_synthetic.json""",
    "unit/data": "train/test_data train/test_images train/test_shuffling",
    "unit/drills": """
        train/test_drill train/test_host_flags train/test_resize_check
        train/test_shares_check train/test_verdict""",
    "unit/elastic": """
        elastic/test_agents elastic/test_attached elastic/test_copies
        elastic/test_decisions elastic/test_event_loop elastic/test_failure_budget
        elastic/test_faults elastic/test_forced_end elastic/test_host_registry
        elastic/test_inspect_job elastic/test_intervals elastic/test_ipv6
        elastic/test_journal elastic/test_leader elastic/test_leadership
        elastic/test_ledger elastic/test_links elastic/test_membership
        elastic/test_mending elastic/test_mirror elastic/test_orders
        elastic/test_progress elastic/test_reachability elastic/test_records
        elastic/test_recovery elastic/test_remapping elastic/test_reports
        elastic/test_resizing elastic/test_roles elastic/test_salvage
        elastic/test_scaling elastic/test_served elastic/test_sizing
        elastic/test_spread elastic/test_storage_health elastic/test_storage_watch
        elastic/test_store_address elastic/test_view""",
    "unit/experiments": """
        checkpoint/test_tier_figures optim/test_nonconvergence
        train/test_balance_placed train/test_recovery_timeline
        train/test_unlike_hosts""",
    "unit/models": "models/test_resnet",
    "unit/optim": """
        optim/test_checks optim/test_guard optim/test_leaves optim/test_matrix
        optim/test_max_adabelief optim/test_per_replica optim/test_periodic_sync
        optim/test_restore optim/test_shampoo optim/test_symmetric optim/test_sync
        optim/test_theory""",
    "unit/parallel": """
        train/test_balancing train/test_constrained train/test_lowering
        train/test_make_step train/test_pipelined train/test_placed
        train/test_placed_resnet train/test_plan_choice train/test_plan_entry
        train/test_planned_update train/test_scale train/test_shampoo
        train/test_sharing train/test_step train/test_trial train/test_uneven""",
    "unit/placement": "planner/test_placement",
    "unit/planner": """
        planner/test_aligning planner/test_assignment planner/test_axis_orders
        planner/test_axis_rules planner/test_blocks planner/test_calibration
        planner/test_cluster planner/test_collective_cost planner/test_combining
        planner/test_compute_cost planner/test_experts planner/test_explain
        planner/test_fewer_devices planner/test_flops planner/test_found_devices
        planner/test_groups planner/test_hlo planner/test_layers planner/test_linking
        planner/test_lints planner/test_loop_copies planner/test_meeting
        planner/test_moments planner/test_pin_prices planner/test_public_measurements
        planner/test_remat planner/test_report planner/test_row_fitting
        planner/test_row_table planner/test_rows planner/test_search
        planner/test_search_exact planner/test_sensitivity planner/test_space
        planner/test_stages planner/test_strided planner/test_trace
        planner/test_transformer planner/test_trips planner/test_verify
        planner/test_what_if planner/test_what_if_stages planner/test_why_not
        planner/test_wording planner/test_work_dims planner/test_zoo""",
    "unit/train": """
        train/test_former_runs train/data/runs_of_12caba6.tar.xz train/test_loop
        train/test_replicas train/test_run_directory train/test_single
        train/test_statistics train/test_window train/test_worker
        train/test_worker_stdout""",
    "compiled": """
        aot/test_gpu_program aot/test_hlo=test_hlo_counts
        aot/test_layers=test_gpu_layers aot/test_optimizer=test_gpu_optimizer
        optim/test_platforms planner/test_bytes planner/test_compiling
        train/test_donation train/test_expert_axis train/test_knobs_compiled
        train/test_offload train/test_plan_verify train/test_verifying""",
    "multiprocess": """
        checkpoint/test_exporter checkpoint/test_nixl checkpoint/test_replicated
        checkpoint/test_socket_owner checkpoint/test_stock_loop
        checkpoint/test_storage_faults checkpoint/test_storing
        checkpoint/test_wire_faults collectives/test_large=test_large_matrices
        collectives/test_processes=test_all_reduce_in_world
        collectives/test_triggers_in_world elastic/test_etcd_cluster
        elastic/test_etcd_server elastic/test_etcd_supervision elastic/test_exports
        elastic/test_interruptions elastic/test_memory_sweep elastic/test_namespaces
        elastic/test_signals elastic/test_stack_dump elastic/test_store
        elastic/test_trainers elastic/test_upkeep optim/test_optax_suites
        test_layers=test_imports
        train/test_heap train/test_leftovers""",
    "support": """
        aot/gpu=gpu_compiler aot/hlo checkpoint/exporting checkpoint/fault_bench
        checkpoint/fault_proxy checkpoint/fuzz_inputs checkpoint/hosts
        checkpoint/managers checkpoint/memory_faults checkpoint/memory_job
        checkpoint/peer_processes checkpoint/restore_in_world checkpoint/restores
        checkpoint/states checkpoint/wire_faults checkpoint/wire_fuzz
        collectives/models=layered collectives/reduce_in_world
        collectives/schedule=trigger_schedules drills/harness elastic/desks
        elastic/etcd_cluster elastic/resizing_job elastic/virtual_loop
        elastic/virtual_world optim/optax_suite planner/chain=layer_chain
        planner/deciding_zoo planner/reading planner/zoo planner/zoo_images
        planner/zoo_language planner/zoo_parts planner/zoo_small
        planner/zoo_transformers train/helpers=tiny_experiment train/pictures
        train/plan_in_world train/plans""",
}
BESIDE = ("data", "golden")
"""Folders of files that a test reads: they go along, below its new folder."""
WORDS = {
    "tests/              mirrors dtft/; tests/drills/ kills real processes": (
        "tests/              unit/ as dtft/, compiled/ what XLA makes of programs, "
        "multiprocess/,\n                        drills/ kill real processes, "
        "support/ helpers, simulation/"
    ),
    "it from about n = 1000 (tests/collectives/test_large.py).": (
        "it from about n = 1000\n(tests/multiprocess/test_large_matrices.py)."
    ),
    "`tests/checkpoint/test_orbax_defects.py`, which does the same to dtft's\n": (
        "`tests/unit/checkpoint/test_orbax_defects.py`, which does the same\nto dtft's "
    ),
    'replica=2, model=1). `tests/checkpoint/"\n': (
        'replica=2, model=1). `tests/unit/checkpoint/"\n'
    ),
    "tests/checkpoint/test_restore_cases.py, whose plans it must agree with.": (
        "tests/unit/checkpoint/test_restore_cases.py, whose plans it must\nagree with."
    ),
}
"""Sentences about the folders, and some that would be too long or are in pieces."""
FORMER = ("aot", "checkpoint", "collectives", "elastic", "models")
FORMER += ("optim", "planner", "train")


def listed(*patterns: str) -> list[str]:
    """Tracked files, of the working tree."""
    command = ["git", "ls-files", *patterns]
    done = subprocess.run(
        command, cwd=REPOSITORY, check=True, capture_output=True, text=True
    )
    return done.stdout.splitlines()


def places() -> dict[str, str]:
    """Old path to new path, of all files that the table names."""
    found: dict[str, str] = {}
    for folder, names in TABLE.items():
        for name in names.split():
            old, _, new = name.partition("=")
            suffix = "" if "." in old else ".py"
            path = Path("tests") / (old + suffix)
            below = path.parent.name if path.parent.name in BESIDE else ""
            target = Path("tests") / folder / below / ((new or path.stem) + path.suffix)
            if str(path) in found:
                sys.exit(f"the table names {path} twice")
            found[str(path)] = str(target)
    return found


def here() -> set[str]:
    """Files below tests/ that may move."""
    return {
        path
        for path in listed("tests")
        if not path.startswith(STAYS) and path not in GONE
    }


def faults(moves: dict[str, str]) -> list[str]:
    """What is wrong with the table, given the files that are there."""
    must = {path for path in here() if not path.startswith("tests/drills/")}
    wrong = [f"not in the table: {path}" for path in sorted(must - moves.keys())]
    targets = sorted(moves.values())
    wrong += [
        f"two files would be {one}"
        for one, next_one in zip(targets, targets[1:], strict=False)
        if one == next_one
    ]
    return wrong


def dotted(path: str) -> str:
    """The module of a path."""
    return path.removesuffix(".py").replace("/", ".")


class Rewriting:
    """Old names in texts become new ones."""

    def __init__(self, moves: dict[str, str]) -> None:
        self._paths = dict(moves)
        for old, new in moves.items():
            if Path(old).parent.name in BESIDE:
                self._paths[str(Path(old).parent)] = str(Path(new).parent)
        python = [it for it in moves.items() if it[0].endswith(".py")]
        self._modules = {dotted(old): dotted(new) for old, new in python}

    def text(self, text: str) -> str:
        """A text with the new names of modules and paths."""
        for old, new in WORDS.items():
            text = text.replace(old, new)
        text = re.sub(
            r"(?m)^([ \t]*)from (tests(?:\.\w+)+) import (\([^)]*\)|[^\n]*)",
            self._import,
            text,
        )
        text = re.sub(
            r"\btests(?:\.\w+)+",
            lambda found: self._dotted(found[0]),
            text,
        )
        return re.sub(r"\btests(?:/[\w.]+)+", lambda it: self._path(it[0]), text)

    def renamed(self, old: str, new: str) -> str:
        """Uses of modules that were imported from their package, and are renamed."""
        names = re.findall(r"(?m)^[ \t]*from (tests\.\w+) import ([\w, ]+)$", old)
        for package, group in names:
            for name in re.split(r",\s*", group):
                module = self._modules.get(f"{package}.{name}")
                base = module and module.rpartition(".")[2]
                if base and base != name:
                    new = re.sub(rf"(?<![\w.]){name}(?=\.\w)", base, new)
        return new

    def _import(self, found: re.Match[str]) -> str:
        indent, package, group = found.groups()
        if package in self._modules:
            return f"{indent}from {self._modules[package]} import {group}"
        comment = re.search(r"  #.*$", group)
        told = comment[0] if comment else ""
        names = re.split(r",\s*", re.sub(r"  #.*$", "", group).strip("() \n,"))
        lines: dict[str, list[str]] = {}
        for name in names:
            module = self._modules.get(f"{package}.{name}", f"{package}.{name}")
            parent, _, base = module.rpartition(".")
            lines.setdefault(parent, []).append(base)
        return "\n".join(
            f"{indent}from {parent} import {', '.join(bases)}{told}"
            for parent, bases in lines.items()
        )

    def _dotted(self, name: str) -> str:
        """`tests.a.b` and `tests.a.b.attribute`."""
        parts = name.split(".")
        for size in range(len(parts), 1, -1):
            module = self._modules.get(".".join(parts[:size]))
            if module:
                return ".".join([module, *parts[size:]])
        return name

    def _path(self, path: str) -> str:
        """A path, also with a full stop behind it."""
        stop = "." if path.endswith(".") else ""
        whole = path.removesuffix(".")
        if whole in self._paths:
            return self._paths[whole] + stop
        if whole + ".py" in self._paths and not stop:  # named without its suffix
            return self._paths[whole + ".py"].removesuffix(".py")
        folder, _, name = whole.rpartition("/")  # as in golden/NAME.json
        if folder in self._paths and Path(folder).name in BESIDE:
            return f"{self._paths[folder]}/{name}{stop}"
        return path


def at_root(text: str, old: str, new: str) -> str:
    """`Path(__file__).parents[n]` of a moved file still means the repository."""
    before, after = (len(Path(path).parts) - 1 for path in (old, new))
    for use in re.findall(r"__file__\)[^\n]*", text):
        levels = re.match(r"__file__\)(?:\.resolve\(\))?\.parents\[(\d+)\]", use)
        beside = re.match(r'__file__\)\.parent / "(\w+)"', use)
        if levels and int(levels[1]) == before:
            continue
        if beside and beside[1] in BESIDE:
            continue
        sys.exit(f"{old}: what should become of Path({use}?")
    return re.sub(
        rf"(__file__\)(?:\.resolve\(\))?\.parents)\[{before}\]", rf"\1[{after}]", text
    )


def run(*command: str) -> int:
    """The exit code of a command in the repository."""
    return subprocess.call(command, cwd=REPOSITORY)


def main(arguments: list[str]) -> int:
    """1 if the table is wrong, or something still names an old place."""
    moves = places()
    wrong = faults(moves)
    for absent in sorted(moves.keys() - here()):
        print(f"not there, left out: {absent}")
        del moves[absent]
    if wrong or arguments == ["--check"]:
        print("\n".join(wrong) or f"{len(moves)} files have a place")
        return int(bool(wrong))
    if run("git", "diff", "--quiet", "HEAD"):
        sys.exit("there are changes: commit them first")
    rewriting = Rewriting(moves)
    own = str(Path(__file__).relative_to(REPOSITORY))
    texts: dict[str, tuple[str, str]] = {}
    for path in listed():
        if path == own or path in GONE:
            continue
        try:
            text = (REPOSITORY / path).read_text()
        except (UnicodeDecodeError, IsADirectoryError, FileNotFoundError):
            continue
        new = rewriting.renamed(text, rewriting.text(text))
        if path in moves and path.endswith(".py"):
            new = at_root(new, path, moves[path])
        texts[path] = (text, new)
    for old, new in moves.items():
        (REPOSITORY / new).parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["git", "mv", old, new], cwd=REPOSITORY, check=True)
    for old in listed(*GONE):
        subprocess.run(["git", "rm", "-q", old], cwd=REPOSITORY, check=True)
    for former in FORMER:  # git leaves folders with what Python has cached
        folder = REPOSITORY / "tests" / former
        if all("__pycache__" in it.parts or it.is_dir() for it in folder.rglob("*")):
            shutil.rmtree(folder, ignore_errors=True)
    changed: list[str] = []
    for old, (before, after) in texts.items():
        if before != after:
            place = moves.get(old, old)
            (REPOSITORY / place).write_text(after)
            changed.append(place)
    python = [path for path in changed if path.endswith(".py")]
    ruff = str(Path(sys.executable).with_name("ruff"))
    run(ruff, "check", "-q", "--select", "I", "--fix", *python)
    run(ruff, "format", "-q", *python)
    run("git", "add", "--", *changed)
    old_place = re.compile(rf"\btests[./](?:{'|'.join(FORMER)})\b")
    left: list[str] = []
    for path in listed():
        if path == own or not (REPOSITORY / path).is_file():
            continue
        lines = (REPOSITORY / path).read_text(errors="ignore").splitlines()
        left += [
            f"{path}:{number}: {line.strip()}"
            for number, line in enumerate(lines, 1)
            if old_place.search(line)
        ]
        if path.startswith("tests/support/"):
            left += [
                f"{path}:{number}: support needs tests: {line.strip()}"
                for number, line in enumerate(lines, 1)
                if re.match(r"\s*(from|import) tests(?!\.support)\b", line)
            ]
    print(f"{len(moves)} files moved, {len(changed)} texts changed")
    print("\n".join(["still an old place:", *left]) if left else "no old place is left")
    return int(bool(left))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
