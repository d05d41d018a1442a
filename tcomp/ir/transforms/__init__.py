"""From tensor expressions to tensor expressions: derivatives in both modes, and batches."""
