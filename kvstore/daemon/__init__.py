"""The node daemon: one process per host that owns the host tier and says who may touch which slot."""
