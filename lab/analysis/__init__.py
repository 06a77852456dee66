"""What a trace holds, before any cache is simulated."""
