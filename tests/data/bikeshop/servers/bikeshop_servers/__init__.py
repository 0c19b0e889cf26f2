"""Servers of a shop that lends bikes: small, ours, in the layout of ThinkingBox's servers."""
