"""A cloud whose machines are namespaces: an address that makes and ends them, and Ray's provider for it."""
