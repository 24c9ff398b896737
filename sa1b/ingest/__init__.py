"""From sources to shards: one task per source, and the run over many of them."""
