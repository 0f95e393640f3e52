"""The engine: carries out what `policy/` decides, with tasks, threads, retries and timers.

Code map. A room imports only rooms above it, and not all of those: the table in `docs/architecture.md` says which.
`tests/test_layers.py` checks the imports and that table.

`runtime/`         threads, the group-committed journal writer, the client for LIST and HEAD, facts from /proc
`cache/`           reads of immutable objects: buffers, ranged GETs, retries, the disk tier, eviction
`namespace/`       inodes, the tree of nodes, lookup, readdir, listings and their TTL, tombstones
`writeback/`       the durable queue of changes that the bucket lacks: order, placement, conflicts
`prefetch/`        hints of jobs, planned fetches, read-ahead from one file to the next
`admin/`           commands on the cache: warm, evict, scrub, pin
`write/`           open, write, flush and close of local content; back-pressure; what becomes of dropped versions
`publish/`         makes the bucket follow: schedule, preparation, multipart uploads, requests, results, commit markers
`namespace_ops/`   create, mkdir, symlink, unlink, rmdir and rename as journaled changes
`durability/`      remote fsync, sync, the status of the queue and the progress of uploads
`recovery/`        journal replay after a start, the quarantine, reading a cache directory without a daemon
`assembly.py`      constructs the parts, from storage up to services
`events.py`        who hears of what: forwards the events of each room to the parts that react
`file_system.py`   starts and stops the parts, answers queries about them

Where to start:
- a read: `cache/block_cache.py`, then `cache/fetcher.py`
- a name or a directory: `namespace/lookup.py`, `namespace/readdir.py`
- a write and its close: `write/file_io.py`, then `write/close.py` and `write/version_states.py`
- how a closed file reaches the bucket: `publish/publisher.py`, then `publish/schedule.py`
- a restart: `recovery/journal_replay.py`
"""
