"""A FUSE session in plain Python over trio, without libfuse; pyfuse3 behind the same interface. Usable alone.

A file system implements `handlers.RequestHandlers`. `library.open_session` mounts it and returns a `FuseSession`:

    class Hello(RequestHandlers):
        async def getattr(self, inode, ctx): ...

    session = open_session(Hello(), MountPlan(mountpoint="/mnt", source="hello", subtype="hello"))
    try:
        trio.run(session.serve)
    finally:
        session.close()

`values`             what handlers receive and return: EntryAttributes, FileInfo, RequestContext, FUSEError, …
`handlers`           the request handlers of a file system, each with its promise; all answer ENOSYS at first
`protocol`           the structs, opcodes and flags of <linux/fuse.h> that are used
`device`             reads requests and writes replies, with or without the interpreter's lock
`mounting`           mounts by mount(2) or fusermount3, unmounts
`negotiation`        the first requests: FUSE_INIT, with versions and features, and a self-test
`requests`           each opcode: its lengths, its handler, its reply
`waiting`            which requests are taken, whose handlers begin, and signals that end them
`session`            the tasks that read and answer requests
`kept_mount`         what outlives the process: the descriptor, and shared memory; see `fusecache/keeper.py`
`kept_requests`      memory for requests, until they are answered
`notifier`           tells the kernel to forget names and pages
`pyfuse3_session`    the same through pyfuse3, where it is installed
"""
