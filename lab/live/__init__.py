"""The same traces against a running service, over HTTP."""
