"""Elastic jobs: membership, leadership, and recovery from failures.

One agent per host runs an event loop. The agent carries out the leader's orders
(`host`), and acts as the leader while its host holds the leader key in etcd (`leader`).

* `store`: etcd and the job's keys in etcd. `messages`: messages between hosts, sent
  over `links` and `network`. `transfer`: moves slices (pieces of the state's arrays)
  between hosts, for copies and for restores.
* Values and decisions of leader and host: `job` (the config of an agent), `assignment`
  (slots and sizes), `seat_policy` and `anti_affinity` (the host of each slot),
  `reachability`, `hang_detection`, `admission` (of a host to a job).
* Tools: `event_loop`; `processes` (start, watch and kill them), `stack_dump` (of a hung
  trainer), `stop_signals` (such as Ctrl-C).
* Access from outside the job: `local_cluster` (a whole job on one machine),
  `inspect_job`, `job_changes` (scale and drain); `faults` for drills, which are runs
  with planned faults.

`dtft.checkpoint` keeps, moves, digests and stores the bytes of the state; `dtft.train`
trains. Agents never import JAX.
"""
