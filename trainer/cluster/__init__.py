"""What the preflight looks at: one node, and the network between nodes."""
