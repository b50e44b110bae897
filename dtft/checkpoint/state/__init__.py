"""The state of a job as values: its leaves and slices, and the digests of their bytes.

* `slices`: leaves, slices and which slot owns which; `partition`: the same for
  thousands of hosts at once, and how two layouts overlap; `digests`: chunks and their
  digests; `ranges`: what a fetch asks for; `sealed_items`: JSON under a digest. These
  import no JAX.
* `tree`, `record`, `leaf_codec`: a user's tree as named leaves, as a JSON record, and
  as bytes and back; `array_bytes`: bytes and fingerprints of device arrays.

Where bytes are kept, and how they travel, is in the packages above.
"""

from typing import TYPE_CHECKING

from dtft._lazy import attributes

if TYPE_CHECKING:
    from dtft.checkpoint.state.array_bytes import fingerprints
    from dtft.checkpoint.state.array_bytes import host_bytes
    from dtft.checkpoint.state.digests import ABSENT
    from dtft.checkpoint.state.digests import Chunks
    from dtft.checkpoint.state.digests import DIGEST_BYTES
    from dtft.checkpoint.state.digests import Parts
    from dtft.checkpoint.state.digests import check_copies
    from dtft.checkpoint.state.digests import chunk_digests
    from dtft.checkpoint.state.digests import copy_and_digest
    from dtft.checkpoint.state.digests import copy_chunk
    from dtft.checkpoint.state.digests import digest_root
    from dtft.checkpoint.state.digests import digests_of_parts
    from dtft.checkpoint.state.digests import equal_chunks
    from dtft.checkpoint.state.digests import is_digest_right
    from dtft.checkpoint.state.digests import pack_flags
    from dtft.checkpoint.state.digests import unpack_flags
    from dtft.checkpoint.state.digests import verify_digests
    from dtft.checkpoint.state.leaf_codec import RestoreTarget
    from dtft.checkpoint.state.leaf_codec import as_array
    from dtft.checkpoint.state.leaf_codec import copy_leaf
    from dtft.checkpoint.state.leaf_codec import default_sharding
    from dtft.checkpoint.state.leaf_codec import is_free_target
    from dtft.checkpoint.state.leaf_codec import is_leaf_unchanged
    from dtft.checkpoint.state.leaf_codec import item_metadata
    from dtft.checkpoint.state.leaf_codec import kind_wanted
    from dtft.checkpoint.state.leaf_codec import refuse_narrowed
    from dtft.checkpoint.state.leaf_codec import restore_result
    from dtft.checkpoint.state.leaf_codec import restore_targets
    from dtft.checkpoint.state.leaf_codec import struct_of
    from dtft.checkpoint.state.partition import LeafBundle
    from dtft.checkpoint.state.partition import Partition
    from dtft.checkpoint.state.partition import Region
    from dtft.checkpoint.state.partition import Spec
    from dtft.checkpoint.state.partition import digests_in
    from dtft.checkpoint.state.partition import leaves_by_spec
    from dtft.checkpoint.state.partition import move_regions
    from dtft.checkpoint.state.partition import nbytes_of
    from dtft.checkpoint.state.partition import normal_spec
    from dtft.checkpoint.state.partition import overlap
    from dtft.checkpoint.state.partition import partition_of
    from dtft.checkpoint.state.partition import span_of
    from dtft.checkpoint.state.ranges import Part
    from dtft.checkpoint.state.ranges import Range
    from dtft.checkpoint.state.ranges import WantedSlice
    from dtft.checkpoint.state.ranges import cut_lent
    from dtft.checkpoint.state.ranges import not_right
    from dtft.checkpoint.state.ranges import range_memory
    from dtft.checkpoint.state.ranges import split_ranges
    from dtft.checkpoint.state.record import DEFAULT
    from dtft.checkpoint.state.record import ITEMS
    from dtft.checkpoint.state.record import Kind
    from dtft.checkpoint.state.record import LeafRecord
    from dtft.checkpoint.state.record import RECORD
    from dtft.checkpoint.state.record import Record
    from dtft.checkpoint.state.record import STATE
    from dtft.checkpoint.state.record import experiment_record
    from dtft.checkpoint.state.record import is_experiment
    from dtft.checkpoint.state.record import leaf_path
    from dtft.checkpoint.state.record import record_of
    from dtft.checkpoint.state.record import state_path
    from dtft.checkpoint.state.record import structure_of
    from dtft.checkpoint.state.sealed_items import CorruptItems
    from dtft.checkpoint.state.sealed_items import items_are_right
    from dtft.checkpoint.state.sealed_items import json_digest
    from dtft.checkpoint.state.sealed_items import sealed
    from dtft.checkpoint.state.sealed_items import unsealed
    from dtft.checkpoint.state.slices import Layout
    from dtft.checkpoint.state.slices import Leaf
    from dtft.checkpoint.state.slices import MeshLayout
    from dtft.checkpoint.state.slices import Slice
    from dtft.checkpoint.state.slices import offsets_of
    from dtft.checkpoint.state.slices import slice_at
    from dtft.checkpoint.state.tree import from_paths
    from dtft.checkpoint.state.tree import listed
    from dtft.checkpoint.state.tree import nested
    from dtft.checkpoint.state.tree import to_paths
    from dtft.checkpoint.state.tree import with_plain_keys
    from dtft.checkpoint.state.tree import with_typed_keys

_PUBLIC = {
    "ABSENT": "digests",
    "Chunks": "digests",
    "CorruptItems": "sealed_items",
    "DEFAULT": "record",
    "DIGEST_BYTES": "digests",
    "ITEMS": "record",
    "Kind": "record",
    "Layout": "slices",
    "Leaf": "slices",
    "LeafBundle": "partition",
    "LeafRecord": "record",
    "MeshLayout": "slices",
    "Part": "ranges",
    "Partition": "partition",
    "Parts": "digests",
    "RECORD": "record",
    "Range": "ranges",
    "Record": "record",
    "Region": "partition",
    "RestoreTarget": "leaf_codec",
    "STATE": "record",
    "Slice": "slices",
    "Spec": "partition",
    "WantedSlice": "ranges",
    "as_array": "leaf_codec",
    "check_copies": "digests",
    "chunk_digests": "digests",
    "copy_and_digest": "digests",
    "copy_chunk": "digests",
    "copy_leaf": "leaf_codec",
    "cut_lent": "ranges",
    "default_sharding": "leaf_codec",
    "digest_root": "digests",
    "digests_in": "partition",
    "digests_of_parts": "digests",
    "equal_chunks": "digests",
    "experiment_record": "record",
    "fingerprints": "array_bytes",
    "from_paths": "tree",
    "host_bytes": "array_bytes",
    "is_digest_right": "digests",
    "is_experiment": "record",
    "is_free_target": "leaf_codec",
    "is_leaf_unchanged": "leaf_codec",
    "item_metadata": "leaf_codec",
    "items_are_right": "sealed_items",
    "json_digest": "sealed_items",
    "kind_wanted": "leaf_codec",
    "leaf_path": "record",
    "leaves_by_spec": "partition",
    "listed": "tree",
    "move_regions": "partition",
    "nbytes_of": "partition",
    "nested": "tree",
    "normal_spec": "partition",
    "not_right": "ranges",
    "offsets_of": "slices",
    "overlap": "partition",
    "pack_flags": "digests",
    "partition_of": "partition",
    "range_memory": "ranges",
    "record_of": "record",
    "refuse_narrowed": "leaf_codec",
    "restore_result": "leaf_codec",
    "restore_targets": "leaf_codec",
    "sealed": "sealed_items",
    "slice_at": "slices",
    "span_of": "partition",
    "split_ranges": "ranges",
    "state_path": "record",
    "struct_of": "leaf_codec",
    "structure_of": "record",
    "to_paths": "tree",
    "unpack_flags": "digests",
    "unsealed": "sealed_items",
    "verify_digests": "digests",
    "with_plain_keys": "tree",
    "with_typed_keys": "tree",
}

__all__ = [
    "ABSENT",
    "Chunks",
    "CorruptItems",
    "DEFAULT",
    "DIGEST_BYTES",
    "ITEMS",
    "Kind",
    "Layout",
    "Leaf",
    "LeafBundle",
    "LeafRecord",
    "MeshLayout",
    "Part",
    "Partition",
    "Parts",
    "RECORD",
    "Range",
    "Record",
    "Region",
    "RestoreTarget",
    "STATE",
    "Slice",
    "Spec",
    "WantedSlice",
    "as_array",
    "check_copies",
    "chunk_digests",
    "copy_and_digest",
    "copy_chunk",
    "copy_leaf",
    "cut_lent",
    "default_sharding",
    "digest_root",
    "digests_in",
    "digests_of_parts",
    "equal_chunks",
    "experiment_record",
    "fingerprints",
    "from_paths",
    "host_bytes",
    "is_digest_right",
    "is_experiment",
    "is_free_target",
    "is_leaf_unchanged",
    "item_metadata",
    "items_are_right",
    "json_digest",
    "kind_wanted",
    "leaf_path",
    "leaves_by_spec",
    "listed",
    "move_regions",
    "nbytes_of",
    "nested",
    "normal_spec",
    "not_right",
    "offsets_of",
    "overlap",
    "pack_flags",
    "partition_of",
    "range_memory",
    "record_of",
    "refuse_narrowed",
    "restore_result",
    "restore_targets",
    "sealed",
    "slice_at",
    "span_of",
    "split_ranges",
    "state_path",
    "struct_of",
    "structure_of",
    "to_paths",
    "unpack_flags",
    "unsealed",
    "verify_digests",
    "with_plain_keys",
    "with_typed_keys",
]

__getattr__, __dir__ = attributes(__name__, _PUBLIC)
