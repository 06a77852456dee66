"""Blocks of other nodes: control and tickets over gRPC, slabs over plain TCP connections opened with such a ticket."""
