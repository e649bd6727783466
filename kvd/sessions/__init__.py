"""Sessions: what they are, what they share, and what an earlier run left of them."""
