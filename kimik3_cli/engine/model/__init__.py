"""The network: decoder layers and their parts."""
