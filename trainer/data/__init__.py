"""From documents to batches: corpora tokenised once, packed into sequences, read in an order that the seed decides."""
