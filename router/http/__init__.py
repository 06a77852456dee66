"""The HTTP side: OpenAI and Anthropic requests in, JSON and server-sent events out. Knows no gRPC and no ranks."""
