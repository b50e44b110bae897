"""Elastic jobs: membership, leadership, and recovery from failures.

One agent per host runs an event loop. The agent obeys the leader (`host`) and leads
while it holds the leader key (`leader`).

* `store`: etcd, and the job's keys in it; `messages`: what hosts tell one another, over
  `links` and `network`; `transfer`: copies of slices, and restores.
* Values and decisions that both sides use: `job` (the config of an agent),
  `assignment` (slots and sizes), `seat_policy`, `anti_affinity` (which spare takes a
  lost slot), `reachability`,
  `hang_detection`; `admission` of a host to a job.
* Tools: `event_loop`, `processes`, `stack_dump`, `stop_signals`.
* From outside: `local_cluster`, `inspect_job`, `scale_job`; `faults` for drills.

Bytes, digests and storage are `dtft.checkpoint`'s; training is `dtft.train`'s. Agents
never import JAX.
"""
