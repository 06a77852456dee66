"""From tokens to what an API shows: text, stop strings, reasoning and tool calls. Pure, one object per choice."""
