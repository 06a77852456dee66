"""The routed experts of a rank."""
