"""The block store: pieces of one size under the hash of what they hold, a cache that gives way to sessions."""
